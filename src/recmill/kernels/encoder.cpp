// A transformer block, forward and backward, over rows of different lengths packed one after the other. Each row passes
// through the complete block while it is in the cache; threads work on different rows. Float32, row-major; D dims, F hidden
// units, H heads. Results do not depend on the number of threads, if there are at most kMinParts / 2.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>
#include <omp.h>

#include "product.h"

namespace {

constexpr int64_t kMinParts = 16;  // parts of a batch, each with its own sums of weight gradients
constexpr int64_t kQueries = 48;   // queries for which attention is computed together

// sums [N] += the sum of M rows of x
void add_rows(const float* x, int64_t M, int64_t N, int64_t stride, float* sums) {
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; n += kLanes) store(sums + n, load(sums + n) + load(x + m * stride + n));
}

// GELU by erf, and its derivative. erf by Abramowitz & Stegun 7.1.26, with an error of at most 1.5e-7.
inline Lanes gelu(Lanes z, Lanes* slope) {
    const Lanes size = z < 0.0f ? -z : z;
    const Lanes bell = exp_of(z * z * -0.5f);
    const Lanes t = 1.0f / (1.0f + size * (0.3275911f * 0.70710678f));
    Lanes p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Lanes half_tail = p * t * bell * 0.5f;  // probability that a normal variable exceeds |z|
    const Lanes below = z < 0.0f ? half_tail : 1.0f - half_tail;
    if (slope) *slope = below + z * bell * 0.398942280f;
    return z * below;
}

struct Dropout {
    float probability;
    // The hash of nn/dropout.py: bits of (row, site, element), with elements counted from the end of a row.
    template <typename Bits>  // uint32_t or LaneBits
    static Bits hash(Bits x) {
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        return x ^ (x >> 16);
    }
    static uint32_t key(int64_t row_key, int64_t site) {
        return hash(static_cast<uint32_t>(row_key ^ (row_key >> 32)) + static_cast<uint32_t>(site) * 0x3C6EF372u);
    }
    // to [D] = dropout(x) + added, where `added` may be null. May work in place.
    void apply(const float* x, int64_t D, uint32_t key, int64_t from_end, const float* added, float* to) const {
        if (probability == 0.0f) {
            for (int64_t d = 0; d < D; ++d) to[d] = x[d] + (added ? added[d] : 0.0f);
            return;
        }
        const int64_t kept_share = static_cast<int64_t>((1.0 - probability) * 4294967296.0);
        const int32_t threshold = static_cast<int32_t>(kept_share - 2147483648LL);
        const float scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(probability)));
        const uint32_t last = static_cast<uint32_t>(from_end * D + D - 1);
        LaneBits element;
        for (int i = 0; i < kLanes; ++i) element[i] = last - i;
        for (int64_t d = 0; d < D; d += kLanes, element -= kLanes) {
            const LaneBits bits = hash(element * 0x9E3779B9u + key);
            const Lanes kept = reinterpret_cast<const LaneInts&>(bits) < threshold ? load(x + d) * scale : Lanes{};
            store(to + d, added ? kept + load(added + d) : kept);
        }
    }
};

struct Moments {
    float mean, inverse_deviation;
};

Moments moments(const float* x, int64_t D) {
    Lanes sum = {}, squares = {};
    for (int64_t d = 0; d < D; d += kLanes) sum += load(x + d);
    const float mean = sum_of(sum) / D;
    for (int64_t d = 0; d < D; d += kLanes) {
        const Lanes centred = load(x + d) - mean;
        squares += centred * centred;
    }
    return {mean, 1.0f / std::sqrt(sum_of(squares) / D + 1e-5f)};
}

void normalize(const float* x, int64_t M, int64_t D, const float* scale, const float* shift, float* y) {
    for (int64_t m = 0; m < M; ++m) {
        const auto [mean, inverse] = moments(x + m * D, D);
        for (int64_t d = 0; d < D; d += kLanes)
            store(y + m * D + d, (load(x + m * D + d) - mean) * inverse * load(scale + d) + load(shift + d));
    }
}

// grad_x = the gradient of normalize()'s input + added, where `added` may be null
void normalize_backward(const float* x, const float* grad, int64_t M, int64_t D, const float* scale, const float* added,
                        float* grad_x, float* grad_scale, float* grad_shift) {
    for (int64_t m = 0; m < M; ++m) {
        const float *from = x + m * D, *g = grad + m * D;
        const auto [mean, inverse] = moments(from, D);
        Lanes sum = {}, product = {};
        for (int64_t d = 0; d < D; d += kLanes) {
            const Lanes centred = (load(from + d) - mean) * inverse, upstream = load(g + d);
            store(grad_scale + d, load(grad_scale + d) + upstream * centred);
            store(grad_shift + d, load(grad_shift + d) + upstream);
            sum += upstream * load(scale + d);
            product += upstream * load(scale + d) * centred;
        }
        const float a = sum_of(sum) / D, b = sum_of(product) / D;
        for (int64_t d = 0; d < D; d += kLanes) {
            const Lanes centred = (load(from + d) - mean) * inverse;
            const Lanes own = (load(g + d) * load(scale + d) - a - centred * b) * inverse;
            store(grad_x + m * D + d, added ? own + load(added + m * D + d) : own);
        }
    }
}

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

void transpose(const float* x, int64_t rows, int64_t columns, int64_t stride, float* to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = x[r * stride + c];
}

}  // namespace

extern "C" {

// The rows of a batch. Row b has the tokens offsets[b] up to offsets[b + 1] - 1 and the queries query_offsets[b] up to
// query_offsets[b + 1] - 1. Query i is token queries[i]; if `queries` is null, every token is a query. The block returns
// the outputs of queries only.
struct Rows {
    int64_t count, longest;
    const int64_t *offsets, *query_offsets, *queries, *keys;
};

struct Shape {
    int64_t D, F, H, is_causal, site;
    float dropout;
};

// Weight and bias of: attention norm; queries, keys and values; output projection; feed-forward norm and its two layers.
struct Weights {
    const float *norm_scale, *norm_shift, *qkv, *qkv_bias, *out, *out_bias;
    const float *feed_scale, *feed_shift, *up, *up_bias, *down, *down_bias;
};

// What forward saves for backward: query [M, D], key and value [N, 2D], log-sum-exp of scores [M, H], attended [M, D],
// the sum after attention [M, D], hidden [M, F]. All null if there is no backward.
struct Saved {
    float *query, *key_value, *log_sums, *attended, *middle, *hidden;
};
}

namespace {

// A matrix [K, N] as contiguous panels of columns: in a wide matrix the rows of a panel would compete for cache lines. N is
// a multiple of a panel's width.
struct Panels {
    std::vector<float> all;
    int64_t K;
    Panels(const float* from, int64_t rows, int64_t N, int64_t row, int64_t column) : all(rows * N), K(rows) {
        constexpr int64_t kWidth = kPanel * kLanes;
        for (int64_t k = 0; k < K; ++k)
            for (int64_t n = 0; n < N; ++n)
                all[n / kWidth * K * kWidth + k * kWidth + n % kWidth] = from[k * row + n * column];
    }
    operator Right() const { return {all.data(), kPanel * kLanes, K * kPanel * kLanes}; }
};

struct TransposedWeights {
    std::vector<float> qkv, out, down;
    Panels up;
    TransposedWeights(const Shape& s, const Weights& w)
        : qkv(3 * s.D * s.D), out(s.D * s.D), down(s.D * s.F), up(w.up, s.D, s.F, 1, s.D) {
        transpose(w.qkv, 3 * s.D, s.D, s.D, qkv.data(), 3 * s.D);
        transpose(w.out, s.D, s.D, s.D, out.data(), s.D);
        transpose(w.down, s.D, s.F, s.F, down.data(), s.D);
    }
};

// The gradients of Weights, one after the other; that of `down` is transposed, [F, D].
struct Gradients {
    float *norm_scale, *norm_shift, *qkv, *qkv_bias, *out, *out_bias;
    float *feed_scale, *feed_shift, *up, *up_bias, *down, *down_bias;
    Gradients(const Shape& s, float* at) {
        const int64_t D = s.D, F = s.F;
        const std::pair<float**, int64_t> all[] = {
            {&norm_scale, D}, {&norm_shift, D}, {&qkv, 3 * D * D}, {&qkv_bias, 3 * D}, {&out, D * D},  {&out_bias, D},
            {&feed_scale, D}, {&feed_shift, D}, {&up, F * D},      {&up_bias, F},      {&down, D * F}, {&down_bias, D}};
        for (const auto& [start, size] : all) *start = std::exchange(at, at + size);
    }
    static int64_t size(const Shape& s) { return 4 * s.D * s.D + 2 * s.D * s.F + 9 * s.D + s.F; }
    static int64_t down_start(const Shape& s) { return size(s) - s.D - s.D * s.F; }
};

struct Row {
    int64_t first, length, first_query, num_queries;
    const int64_t* queries;
    uint32_t attention_key, feed_key;
    Row(const Rows& rows, const Shape& s, int64_t b)
        : first(rows.offsets[b]), length(rows.offsets[b + 1] - first), first_query(rows.query_offsets[b]),
          num_queries(rows.query_offsets[b + 1] - first_query),
          queries(rows.queries ? rows.queries + first_query : nullptr),
          attention_key(Dropout::key(rows.keys[b], s.site)), feed_key(Dropout::key(rows.keys[b], s.site + 1)) {}
    int64_t position(int64_t i) const { return queries ? queries[i] - first : i; }  // of query i in the row
    int64_t from_end(int64_t i) const { return length - 1 - position(i); }
    int64_t visible(int64_t i, const Shape& s) const { return s.is_causal ? position(i) + 1 : length; }
    // Returns the queries' rows of x [length, D], copied to `scratch` unless every token is a query.
    const float* query_rows(const float* x, int64_t D, float* scratch) const {
        if (!queries) return x;
        for (int64_t i = 0; i < num_queries; ++i) std::memcpy(scratch + i * D, x + position(i) * D, D * sizeof(float));
        return scratch;
    }
};

// A thread's memory for one row.
struct Scratch {
    std::vector<float> all;
    float *normed, *query_rows, *change, *hidden, *slope, *keys, *values, *weights, *grad_weights, *grad_query, *grad_kv;
    Saved saved;  // used if there is no backward
    Scratch(const Shape& s, int64_t longest) {
        const int64_t wide = round_up(longest), head = s.D / s.H;
        const int64_t dims = longest * s.D, units = longest * s.F;
        const std::pair<float**, int64_t> parts[] = {
            {&normed, dims}, {&query_rows, dims}, {&change, dims}, {&hidden, units}, {&slope, units},
            {&keys, head * wide}, {&values, head * wide}, {&weights, kQueries * wide}, {&grad_weights, kQueries * wide},
            {&grad_query, dims}, {&grad_kv, 2 * dims}, {&saved.query, dims}, {&saved.key_value, 2 * dims},
            {&saved.log_sums, longest * s.H}, {&saved.attended, dims}, {&saved.middle, dims}, {&saved.hidden, units}};
        int64_t total = 0;
        for (const auto& part : parts) total += part.second;
        all.resize(total);
        float* at = all.data();
        for (const auto& [start, size] : parts) *start = std::exchange(at, at + size);
    }
    // Returns where the values of `row` are saved: in those of the batch, or here if there is no backward.
    Saved of_row(const Saved& batch, const Row& row, const Shape& s) const {
        if (!batch.hidden) return saved;
        const int64_t query = row.first_query;
        return {batch.query + query * s.D,    batch.key_value + row.first * 2 * s.D, batch.log_sums + query * s.H,
                batch.attended + query * s.D, batch.middle + query * s.D,            batch.hidden + query * s.F};
    }
};

// to [count, wide] = the products of `count` queries with the first `visible` keys; `keys` is transposed.
void scores(const Shape& s, const float* query, const float* keys, int64_t wide, int64_t count, int64_t visible, float* to) {
    multiply(count, round_up(visible), s.D / s.H, rows_of(query, s.D), {keys, wide}, to, wide);
}

void attend(const Shape& s, const Row& row, const Saved& saved, Scratch& scratch) {
    const int64_t D = s.D, head = D / s.H, wide = round_up(row.length);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head));
    for (int64_t h = 0; h < s.H; ++h) {
        const float *key = saved.key_value + h * head, *value = key + D;
        std::memset(scratch.keys, 0, head * wide * sizeof(float));
        transpose(key, row.length, head, 2 * D, scratch.keys, wide);
        for (int64_t first = 0; first < row.num_queries; first += kQueries) {
            const int64_t count = std::min(kQueries, row.num_queries - first), visible = row.visible(first + count - 1, s);
            const float* query = saved.query + first * D + h * head;
            float inverse[kQueries];
            scores(s, query, scratch.keys, wide, count, visible, scratch.weights);
            for (int64_t i = 0; i < count; ++i) {
                float* w = scratch.weights + i * wide;
                const int64_t end = round_up(visible);
                for (int64_t j = row.visible(first + i, s); j < end; ++j) w[j] = -INFINITY;
                Lanes largest = load(w), sum = {};
                for (int64_t j = kLanes; j < end; j += kLanes) largest = load(w + j) > largest ? load(w + j) : largest;
                const float top = max_of(largest);
                for (int64_t j = 0; j < end; j += kLanes) {
                    const Lanes e = exp_of((load(w + j) - top) * scale);
                    store(w + j, e);
                    sum += e;
                }
                const float total = sum_of(sum);
                inverse[i] = 1.0f / total;
                saved.log_sums[(first + i) * s.H + h] = top * scale + std::log(total);
            }
            float* attended = saved.attended + first * D + h * head;
            multiply(count, head, visible, rows_of(scratch.weights, wide), {value, 2 * D}, attended, D);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t d = 0; d < head; d += kLanes)
                    store(attended + i * D + d, load(attended + i * D + d) * inverse[i]);
        }
    }
}

// Computes scratch.grad_query and scratch.grad_kv from grad [queries, D], the gradient of saved.attended.
void attend_backward(const Shape& s, const Row& row, const Saved& saved, const float* grad, Scratch& scratch) {
    const int64_t D = s.D, head = D / s.H, wide = round_up(row.length);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head));
    std::memset(scratch.grad_kv, 0, row.length * 2 * D * sizeof(float));
    for (int64_t h = 0; h < s.H; ++h) {
        const float *key = saved.key_value + h * head, *value = key + D;
        std::memset(scratch.keys, 0, head * wide * sizeof(float));
        std::memset(scratch.values, 0, head * wide * sizeof(float));
        transpose(key, row.length, head, 2 * D, scratch.keys, wide);
        transpose(value, row.length, head, 2 * D, scratch.values, wide);
        float *grad_key = scratch.grad_kv + h * head, *grad_value = grad_key + D;
        for (int64_t first = 0; first < row.num_queries; first += kQueries) {
            const int64_t count = std::min(kQueries, row.num_queries - first), visible = row.visible(first + count - 1, s);
            const int64_t end = round_up(visible);
            const float *query = saved.query + first * D + h * head, *g = grad + first * D + h * head;
            scores(s, query, scratch.keys, wide, count, visible, scratch.weights);
            multiply(count, end, head, rows_of(g, D), {scratch.values, wide}, scratch.grad_weights, wide);
            for (int64_t i = 0; i < count; ++i) {
                const float* out = saved.attended + (first + i) * D + h * head;
                Lanes product = {};
                for (int64_t d = 0; d < head; d += kLanes) product += load(g + i * D + d) * load(out + d);
                // Equals the mean of grad_w, weighted by attention.
                const float mean = sum_of(product), log_sum = saved.log_sums[(first + i) * s.H + h];
                float *w = scratch.weights + i * wide, *grad_w = scratch.grad_weights + i * wide;
                for (int64_t j = row.visible(first + i, s); j < end; ++j) w[j] = -INFINITY;
                for (int64_t j = 0; j < end; j += kLanes) {
                    const Lanes weight = exp_of(load(w + j) * scale - log_sum);
                    store(w + j, weight);
                    store(grad_w + j, weight * (load(grad_w + j) - mean) * scale);
                }
            }
            multiply(count, head, visible, rows_of(scratch.grad_weights, wide), {key, 2 * D},
                     scratch.grad_query + first * D + h * head, D);
            add_product(visible, head, count, columns_of(scratch.grad_weights, wide), {query, D}, grad_key, 2 * D);
            add_product(visible, head, count, columns_of(scratch.weights, wide), {g, D}, grad_value, 2 * D);
        }
    }
}

// Computes grad_middle [queries, D], the gradient of saved.middle, from that of the block's output.
void feed_forward_backward(const Shape& s, const Weights& w, const Row& row, const Saved& saved, const Panels& down,
                           const float* grad_out, float* grad_middle, Scratch& scratch, const Gradients& g) {
    const int64_t D = s.D, F = s.F, M = row.num_queries;
    const Dropout dropout{s.dropout};
    for (int64_t i = 0; i < M; ++i)
        dropout.apply(grad_out + i * D, D, row.feed_key, row.from_end(i), nullptr, scratch.change + i * D);
    add_rows(scratch.change, M, D, D, g.down_bias);
    for (int64_t i = 0; i < M * F; i += kLanes) {
        Lanes slope;
        store(scratch.hidden + i, gelu(load(saved.hidden + i), &slope));
        store(scratch.slope + i, slope);
    }
    add_product(F, D, M, columns_of(scratch.hidden, F), {scratch.change, D}, g.down, D);
    multiply(M, F, D, rows_of(scratch.change, D), down, scratch.hidden, F);
    for (int64_t i = 0; i < M * F; i += kLanes)
        store(scratch.hidden + i, load(scratch.hidden + i) * load(scratch.slope + i));
    add_rows(scratch.hidden, M, F, F, g.up_bias);
    normalize(saved.middle, M, D, w.feed_scale, w.feed_shift, scratch.normed);
    add_product(F, D, M, columns_of(scratch.hidden, F), {scratch.normed, D}, g.up, D);
    multiply(M, D, F, rows_of(scratch.hidden, F), {w.up, D}, scratch.change, D);
    normalize_backward(saved.middle, scratch.change, M, D, w.feed_scale, grad_out, grad_middle, g.feed_scale, g.feed_shift);
}

// Computes grad_x [length, D] from grad_middle: norm, projections and attention.
void attention_half_backward(const Shape& s, const Weights& w, const Row& row, const Saved& saved, const float* x,
                             const float* grad_middle, float* grad_x, Scratch& scratch, const Gradients& g) {
    const int64_t D = s.D, M = row.num_queries, L = row.length;
    const Dropout dropout{s.dropout};
    for (int64_t i = 0; i < M; ++i)
        dropout.apply(grad_middle + i * D, D, row.attention_key, row.from_end(i), nullptr, scratch.change + i * D);
    add_rows(scratch.change, M, D, D, g.out_bias);
    add_product(D, D, M, columns_of(scratch.change, D), {saved.attended, D}, g.out, D);
    multiply(M, D, D, rows_of(scratch.change, D), {w.out, D}, scratch.hidden, D);
    attend_backward(s, row, saved, scratch.hidden, scratch);
    add_rows(scratch.grad_query, M, D, D, g.qkv_bias);
    add_rows(scratch.grad_kv, L, 2 * D, 2 * D, g.qkv_bias + D);
    normalize(x, L, D, w.norm_scale, w.norm_shift, scratch.normed);
    const float* query_rows = row.query_rows(scratch.normed, D, scratch.hidden);
    add_product(D, D, M, columns_of(scratch.grad_query, D), {query_rows, D}, g.qkv, D);
    add_product(2 * D, D, L, columns_of(scratch.grad_kv, 2 * D), {scratch.normed, D}, g.qkv + D * D, D);
    multiply(L, D, 2 * D, rows_of(scratch.grad_kv, 2 * D), {w.qkv + D * D, D}, scratch.change, D);
    if (!row.queries) {
        add_product(M, D, D, rows_of(scratch.grad_query, D), {w.qkv, D}, scratch.change, D);
        normalize_backward(x, scratch.change, L, D, w.norm_scale, grad_middle, grad_x, g.norm_scale, g.norm_shift);
        return;
    }
    multiply(M, D, D, rows_of(scratch.grad_query, D), {w.qkv, D}, scratch.hidden, D);
    for (int64_t i = 0; i < M; ++i) add_rows(scratch.hidden + i * D, 1, D, D, scratch.change + row.position(i) * D);
    normalize_backward(x, scratch.change, L, D, w.norm_scale, nullptr, grad_x, g.norm_scale, g.norm_shift);
    for (int64_t i = 0; i < M; ++i) add_rows(grad_middle + i * D, 1, D, D, grad_x + row.position(i) * D);
}

// Splits rows into parts of about equal work; part p has the rows starts[p] up to starts[p + 1] - 1.
std::vector<int64_t> parts_of(const Rows& rows, const Shape& s) {
    const int64_t parts = std::min(rows.count, std::max<int64_t>(kMinParts, 2 * omp_get_max_threads()));
    std::vector<double> work(rows.count + 1, 0.0);
    for (int64_t b = 0; b < rows.count; ++b) {
        const double length = rows.offsets[b + 1] - rows.offsets[b];
        const double queries = rows.query_offsets[b + 1] - rows.query_offsets[b];
        work[b + 1] = work[b] + length * 2 * s.D + queries * (2 * s.D + 2 * s.F + 2 * length);
    }
    std::vector<int64_t> starts;
    for (int64_t p = 0; p < parts; ++p)
        starts.push_back(std::lower_bound(work.begin(), work.end(), work.back() * p / parts) - work.begin());
    starts.push_back(rows.count);
    return starts;
}

}  // namespace

extern "C" {

// Computes out [queries, D] from x [tokens, D].
void encoder_block(const Shape* shape, const Rows* batch, const Weights* weights, const float* x, const Saved* all_saved,
                   float* out) {
    const Shape& s = *shape;
    const Weights& w = *weights;
    const int64_t D = s.D, F = s.F;
    const TransposedWeights transposed(s, w);
    const Dropout dropout{s.dropout};
    const auto starts = parts_of(*batch, s);
#pragma omp parallel
    {
        Scratch scratch(s, batch->longest);
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < static_cast<int64_t>(starts.size()) - 1; ++part)
            for (int64_t b = starts[part]; b < starts[part + 1]; ++b) {
                const Row row(*batch, s, b);
                const int64_t M = row.num_queries;
                if (!M) continue;
                const Saved saved = scratch.of_row(*all_saved, row, s);
                const float* row_x = x + row.first * D;
                normalize(row_x, row.length, D, w.norm_scale, w.norm_shift, scratch.normed);
                multiply_onto(w.qkv_bias + D, 0, row.length, 2 * D, D, rows_of(scratch.normed, D),
                              {transposed.qkv.data() + D, 3 * D}, saved.key_value, 2 * D);
                multiply_onto(w.qkv_bias, 0, M, D, D, rows_of(row.query_rows(scratch.normed, D, scratch.query_rows), D),
                              {transposed.qkv.data(), 3 * D}, saved.query, D);
                attend(s, row, saved, scratch);
                multiply_onto(w.out_bias, 0, M, D, D, rows_of(saved.attended, D), {transposed.out.data(), D},
                              scratch.change, D);
                for (int64_t i = 0; i < M; ++i)
                    dropout.apply(scratch.change + i * D, D, row.attention_key, row.from_end(i),
                                  row_x + row.position(i) * D, saved.middle + i * D);
                normalize(saved.middle, M, D, w.feed_scale, w.feed_shift, scratch.normed);
                multiply_onto(w.up_bias, 0, M, F, D, rows_of(scratch.normed, D), transposed.up, saved.hidden, F);
                for (int64_t i = 0; i < M * F; i += kLanes)
                    store(scratch.hidden + i, gelu(load(saved.hidden + i), nullptr));
                multiply_onto(w.down_bias, 0, M, D, F, rows_of(scratch.hidden, F), {transposed.down.data(), D},
                              scratch.change, D);
                for (int64_t i = 0; i < M; ++i)
                    dropout.apply(scratch.change + i * D, D, row.feed_key, row.from_end(i), saved.middle + i * D,
                                  out + (row.first_query + i) * D);
            }
    }
}

// Computes grad_x [tokens, D], and `grads`: the gradients of all weights one after the other, in the order of Weights.
void encoder_block_backward(const Shape* shape, const Rows* batch, const Weights* weights, const float* x,
                            const Saved* all_saved, const float* grad_out, float* grad_x, float* grads) {
    const Shape& s = *shape;
    const int64_t D = s.D, F = s.F;
    const auto starts = parts_of(*batch, s);
    const int64_t parts = static_cast<int64_t>(starts.size()) - 1, total = Gradients::size(s);
    std::vector<float> sums(parts * total);
    const Panels down(weights->down, D, F, F, 1);
#pragma omp parallel
    {
        Scratch scratch(s, batch->longest);
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < parts; ++part) {
            const Gradients part_sums(s, sums.data() + part * total);
            for (int64_t b = starts[part]; b < starts[part + 1]; ++b) {
                const Row row(*batch, s, b);
                if (!row.num_queries) {
                    std::memset(grad_x + row.first * D, 0, row.length * D * sizeof(float));
                    continue;
                }
                const Saved saved = scratch.of_row(*all_saved, row, s);
                float* grad_middle = scratch.query_rows;
                feed_forward_backward(s, *weights, row, saved, down, grad_out + row.first_query * D, grad_middle, scratch,
                                      part_sums);
                attention_half_backward(s, *weights, row, saved, x + row.first * D, grad_middle, grad_x + row.first * D,
                                        scratch, part_sums);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < total; ++i) {
            float sum = 0;
            for (int64_t part = 0; part < parts; ++part) sum += sums[part * total + i];
            const int64_t start = Gradients::down_start(s), at = i - start;  // `down` is transposed back
            grads[at < 0 || at >= D * F ? i : start + at % D * F + at / D] = sum;
        }
    }
}

// to [tokens, D] = dropout(x). Applied to a gradient, it is its own backward.
void drop_elements(const Rows* rows, int64_t D, int64_t site, float probability, const float* x, float* to) {
    const Dropout dropout{probability};
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < rows->count; ++b) {
        const int64_t first = rows->offsets[b], end = rows->offsets[b + 1];
        for (int64_t i = first; i < end; ++i)
            dropout.apply(x + i * D, D, Dropout::key(rows->keys[b], site), end - 1 - i, nullptr, to + i * D);
    }
}

}  // extern "C"
