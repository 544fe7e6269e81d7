// A block of a transformer, forward and backward, over rows of different lengths packed one after the other. A row goes
// through the whole block while it is in the cache; threads take rows. Float32, row-major; D dims, F hidden, H heads.
// Results do not depend on the number of threads up to half of kLeastParts.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>
#include <omp.h>

#include "product.h"

namespace {

constexpr int64_t kLeastParts = 16;  // pieces of a batch that sum up weight gradients, each on its own
constexpr int64_t kQueries = 48;     // of attention at once

// sums [N] += the sum over M rows
void add_rows(const float* x, int64_t M, int64_t N, int64_t stride, float* sums) {
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; n += kLanes) store(sums + n, load(sums + n) + load(x + m * stride + n));
}

// GELU with erf, and its derivative. erf after Abramowitz & Stegun 7.1.26: within 1.5e-7.
inline Lanes gelu(Lanes z, Lanes* slope) {
    const Lanes size = z < 0.0f ? -z : z;
    const Lanes bell = exp_of(z * z * -0.5f);
    const Lanes t = 1.0f / (1.0f + size * (0.3275911f * 0.70710678f));
    Lanes p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Lanes half_tail = p * t * bell * 0.5f;  // of the normal distribution beyond |z|
    const Lanes below = z < 0.0f ? half_tail : 1.0f - half_tail;
    if (slope) *slope = below + z * bell * 0.398942280f;
    return z * below;
}

struct Dropout {
    float probability;
    // As nn/dropout.py has it: bits of (row, site, element), elements counted from a row's end.
    static uint32_t mixed(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        return x ^ (x >> 16);
    }
    static uint32_t key(int64_t row_key, int64_t site) {
        return mixed(static_cast<uint32_t>(row_key ^ (row_key >> 32)) + static_cast<uint32_t>(site) * 0x3C6EF372u);
    }
    // to [D] = x, dropped, + more (or nothing). May be in place.
    void apply(const float* x, int64_t D, uint32_t key, int64_t from_end, const float* more, float* to) const {
        if (probability == 0.0f) {
            for (int64_t d = 0; d < D; ++d) to[d] = x[d] + (more ? more[d] : 0.0f);
            return;
        }
        const int32_t threshold = static_cast<int32_t>(static_cast<int64_t>((1.0 - probability) * 4294967296.0) - 2147483648LL);
        const float scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(probability)));
        const uint32_t last = static_cast<uint32_t>(from_end * D + D - 1);
        LaneBits element;
        for (int i = 0; i < kLanes; ++i) element[i] = last - i;
        for (int64_t d = 0; d < D; d += kLanes, element -= kLanes) {
            LaneBits bits = element * 0x9E3779B9u + key;
            bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
            bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
            bits ^= bits >> 16;
            const Lanes kept = reinterpret_cast<LaneInts&>(bits) < threshold ? load(x + d) * scale : Lanes{};
            store(to + d, more ? kept + load(more + d) : kept);
        }
    }
};

struct Moments {
    float mean, inverse;  // of the standard deviation
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

// grad_x = the gradient through normalize() + more
void normalize_backward(const float* x, const float* grad, int64_t M, int64_t D, const float* scale, const float* more,
                        float* grad_x, float* grad_scale, float* grad_shift) {
    for (int64_t m = 0; m < M; ++m) {
        const float *from = x + m * D, *g = grad + m * D;
        const auto [mean, inverse] = moments(from, D);
        Lanes sum = {}, product = {};
        for (int64_t d = 0; d < D; d += kLanes) {
            const Lanes centred = (load(from + d) - mean) * inverse, wanted = load(g + d);
            store(grad_scale + d, load(grad_scale + d) + wanted * centred);
            store(grad_shift + d, load(grad_shift + d) + wanted);
            sum += wanted * load(scale + d);
            product += wanted * load(scale + d) * centred;
        }
        const float a = sum_of(sum) / D, b = sum_of(product) / D;
        for (int64_t d = 0; d < D; d += kLanes) {
            const Lanes centred = (load(from + d) - mean) * inverse;
            const Lanes own = (load(g + d) * load(scale + d) - a - centred * b) * inverse;
            store(grad_x + m * D + d, more ? own + load(more + m * D + d) : own);
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

// Rows of a batch: row b has tokens offsets[b] up to the next, and queries query_offsets[b] up to the next; query i is
// token places[i] (none: every token is a query). Only queries leave the block.
struct Rows {
    int64_t count, longest;
    const int64_t *offsets, *query_offsets, *places, *keys;
};

struct Shape {
    int64_t D, F, H, is_causal, site;
    float dropout;
};

struct Weights {
    const float *norm_scale, *norm_shift, *qkv, *qkv_bias, *out, *out_bias;
    const float *feed_scale, *feed_shift, *up, *up_bias, *down, *down_bias;
};

// What backward needs: query [M, D], key and value [N, 2D], weight sums [M, H], attended [M, D], middle [M, D], hidden [M, F].
// Nothing, where there is none.
struct Kept {
    float *query, *key_value, *weight_sums, *attended, *middle, *hidden;
};
}

namespace {

// A matrix [K, N] cut into panels that lie in one piece each: with a wide N their rows would compete for cache lines.
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

struct Turned {  // weights with inputs as rows
    std::vector<float> qkv, out, down;
    Panels up;
    Turned(const Shape& s, const Weights& w)
        : qkv(3 * s.D * s.D), out(s.D * s.D), down(s.D * s.F), up(w.up, s.D, s.F, 1, s.D) {
        transpose(w.qkv, 3 * s.D, s.D, s.D, qkv.data(), 3 * s.D);
        transpose(w.out, s.D, s.D, s.D, out.data(), s.D);
        transpose(w.down, s.D, s.F, s.F, down.data(), s.D);
    }
};

struct Row {
    int64_t first, length, query, queries;
    const int64_t* places;
    uint32_t attention_key, feed_key;
    Row(const Rows& rows, const Shape& s, int64_t b)
        : first(rows.offsets[b]), length(rows.offsets[b + 1] - first), query(rows.query_offsets[b]),
          queries(rows.query_offsets[b + 1] - query), places(rows.places ? rows.places + query : nullptr),
          attention_key(Dropout::key(rows.keys[b], s.site)), feed_key(Dropout::key(rows.keys[b], s.site + 1)) {}
    int64_t place(int64_t i) const { return places ? places[i] - first : i; }
    int64_t from_end(int64_t i) const { return length - 1 - place(i); }
    int64_t seen(int64_t i, const Shape& s) const { return s.is_causal ? place(i) + 1 : length; }
    // The rows of x [length, D] that are queries.
    const float* asked(const float* x, int64_t D, float* room) const {
        if (!places) return x;
        for (int64_t i = 0; i < queries; ++i) std::memcpy(room + i * D, x + place(i) * D, D * sizeof(float));
        return room;
    }
};

// One thread's room for a row.
struct Room {
    std::vector<float> all;
    float *normed, *asked, *change, *hidden, *slope, *turned, *turned_value, *weights, *by_weights, *by_query, *by_kv;
    Kept kept;  // of this row
    Room(const Shape& s, int64_t longest) {
        const int64_t wide = round_up(longest), head = s.D / s.H;
        const int64_t D = longest * s.D, F = longest * s.F;
        const int64_t sizes[] = {D, D, D, F, F, head * wide, head * wide, kQueries * wide, kQueries * wide, D, 2 * D,
                                 D, 2 * D, longest * s.H, D, D, F};
        float** parts[] = {&normed, &asked, &change, &hidden, &slope, &turned, &turned_value, &weights, &by_weights,
                           &by_query, &by_kv, &kept.query, &kept.key_value, &kept.weight_sums, &kept.attended,
                           &kept.middle, &kept.hidden};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        all.resize(total);
        float* at = all.data();
        for (int i = 0; i < 17; ++i) *parts[i] = at, at += sizes[i];
    }
    // Where `row` keeps its values: in `all`, or in this room.
    Kept of(const Kept& all, const Row& row, const Shape& s) const {
        if (!all.hidden) return kept;
        return {all.query + row.query * s.D,       all.key_value + row.first * 2 * s.D, all.weight_sums + row.query * s.H,
                all.attended + row.query * s.D,    all.middle + row.query * s.D,        all.hidden + row.query * s.F};
    }
};

// Scores of `count` queries from `first` on against the keys they see: [count, wide], scaled.
void scores(const Shape& s, const float* query, const float* turned, int64_t wide, int64_t count, int64_t keys, float* to) {
    multiply(count, round_up(keys), s.D / s.H, rows_of(query, s.D), {turned, wide}, nullptr, 0, to, wide);
}

void attend(const Shape& s, const Row& row, const Kept& k, Room& room) {
    const int64_t D = s.D, head = D / s.H, wide = round_up(row.length);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head));
    for (int64_t h = 0; h < s.H; ++h) {
        const float *key = k.key_value + h * head, *value = key + D;
        std::memset(room.turned, 0, head * wide * sizeof(float));
        transpose(key, row.length, head, 2 * D, room.turned, wide);
        for (int64_t first = 0; first < row.queries; first += kQueries) {
            const int64_t count = std::min(kQueries, row.queries - first), keys = row.seen(first + count - 1, s);
            const float* query = k.query + first * D + h * head;
            float inverse[kQueries];
            scores(s, query, room.turned, wide, count, keys, room.weights);
            for (int64_t i = 0; i < count; ++i) {
                float* w = room.weights + i * wide;
                const int64_t seen = row.seen(first + i, s), end = round_up(keys);
                for (int64_t j = seen; j < end; ++j) w[j] = -INFINITY;
                Lanes most = load(w), sum = {};
                for (int64_t j = kLanes; j < end; j += kLanes) most = load(w + j) > most ? load(w + j) : most;
                const float top = largest_of(most);
                for (int64_t j = 0; j < end; j += kLanes) {
                    const Lanes e = exp_of((load(w + j) - top) * scale);
                    store(w + j, e);
                    sum += e;
                }
                const float total = sum_of(sum);
                inverse[i] = 1.0f / total;
                k.weight_sums[(first + i) * s.H + h] = top * scale + std::log(total);
            }
            float* attended = k.attended + first * D + h * head;
            multiply(count, head, keys, rows_of(room.weights, wide), {value, 2 * D}, nullptr, 0, attended, D);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t d = 0; d < head; d += kLanes) store(attended + i * D + d, load(attended + i * D + d) * inverse[i]);
        }
    }
}

// by_query and by_kv of `room` from the gradient of `attended`, grad [queries, D].
void attend_backward(const Shape& s, const Row& row, const Kept& k, const float* grad, Room& room) {
    const int64_t D = s.D, head = D / s.H, wide = round_up(row.length);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head));
    std::memset(room.by_kv, 0, row.length * 2 * D * sizeof(float));
    for (int64_t h = 0; h < s.H; ++h) {
        const float *key = k.key_value + h * head, *value = key + D;
        std::memset(room.turned, 0, head * wide * sizeof(float));
        std::memset(room.turned_value, 0, head * wide * sizeof(float));
        transpose(key, row.length, head, 2 * D, room.turned, wide);
        transpose(value, row.length, head, 2 * D, room.turned_value, wide);
        float *by_key = room.by_kv + h * head, *by_value = by_key + D;
        for (int64_t first = 0; first < row.queries; first += kQueries) {
            const int64_t count = std::min(kQueries, row.queries - first), keys = row.seen(first + count - 1, s);
            const int64_t end = round_up(keys);
            const float *query = k.query + first * D + h * head, *g = grad + first * D + h * head;
            scores(s, query, room.turned, wide, count, keys, room.weights);
            multiply(count, end, head, rows_of(g, D), {room.turned_value, wide}, nullptr, 0, room.by_weights, wide);
            for (int64_t i = 0; i < count; ++i) {
                const float* out = k.attended + (first + i) * D + h * head;
                Lanes product = {};
                for (int64_t d = 0; d < head; d += kLanes) product += load(g + i * D + d) * load(out + d);
                const float mean = sum_of(product), top = k.weight_sums[(first + i) * s.H + h];
                float *w = room.weights + i * wide, *by = room.by_weights + i * wide;
                for (int64_t j = row.seen(first + i, s); j < end; ++j) w[j] = -INFINITY;
                for (int64_t j = 0; j < end; j += kLanes) {
                    const Lanes weight = exp_of(load(w + j) * scale - top);
                    store(w + j, weight);
                    store(by + j, weight * (load(by + j) - mean) * scale);
                }
            }
            multiply(count, head, keys, rows_of(room.by_weights, wide), {key, 2 * D}, nullptr, 0,
                     room.by_query + first * D + h * head, D);
            multiply(keys, head, count, columns_of(room.by_weights, wide), {query, D}, by_key, 2 * D, by_key, 2 * D);
            multiply(keys, head, count, columns_of(room.weights, wide), {g, D}, by_value, 2 * D, by_value, 2 * D);
        }
    }
}

// Rows cut into parts of about equal work; part p is rows starts[p] up to the next.
std::vector<int64_t> parts_of(const Rows& rows, const Shape& s) {
    const int64_t parts = std::min(rows.count, std::max<int64_t>(kLeastParts, 2 * omp_get_max_threads()));
    std::vector<double> work(rows.count + 1, 0.0);
    for (int64_t b = 0; b < rows.count; ++b) {
        const double length = rows.offsets[b + 1] - rows.offsets[b], asked = rows.query_offsets[b + 1] - rows.query_offsets[b];
        work[b + 1] = work[b] + length * 2 * s.D + asked * (2 * s.D + 2 * s.F + 2 * length);
    }
    std::vector<int64_t> starts;
    for (int64_t p = 0; p < parts; ++p)
        starts.push_back(std::lower_bound(work.begin(), work.end(), work.back() * p / parts) - work.begin());
    starts.push_back(rows.count);
    return starts;
}

}  // namespace

extern "C" {

// out [queries, D] from x [tokens, D]
void encoder_block(const Shape* shape, const Rows* rows_in, const Weights* weights, const float* x, const Kept* kept,
                   float* out) {
    const Shape& s = *shape;
    const Rows& rows = *rows_in;
    const Weights& w = *weights;
    const int64_t D = s.D, F = s.F;
    const Turned turned(s, w);
    const Dropout dropout{s.dropout};
    const auto starts = parts_of(rows, s);
#pragma omp parallel
    {
        Room room(s, rows.longest);
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < static_cast<int64_t>(starts.size()) - 1; ++part)
            for (int64_t b = starts[part]; b < starts[part + 1]; ++b) {
                const Row row(rows, s, b);
                if (!row.queries) continue;
                const Kept k = room.of(*kept, row, s);
                const float* own = x + row.first * D;
                normalize(own, row.length, D, w.norm_scale, w.norm_shift, room.normed);
                multiply(row.length, 2 * D, D, rows_of(room.normed, D), {turned.qkv.data() + D, 3 * D}, w.qkv_bias + D, 0,
                         k.key_value, 2 * D);
                multiply(row.queries, D, D, rows_of(row.asked(room.normed, D, room.asked), D), {turned.qkv.data(), 3 * D},
                         w.qkv_bias, 0, k.query, D);
                attend(s, row, k, room);
                multiply(row.queries, D, D, rows_of(k.attended, D), {turned.out.data(), D}, w.out_bias, 0,
                         room.change, D);
                float* middle = k.middle;
                for (int64_t i = 0; i < row.queries; ++i)
                    dropout.apply(room.change + i * D, D, row.attention_key, row.from_end(i), own + row.place(i) * D,
                                  middle + i * D);
                normalize(middle, row.queries, D, w.feed_scale, w.feed_shift, room.normed);
                float* hidden = k.hidden;
                multiply(row.queries, F, D, rows_of(room.normed, D), turned.up, w.up_bias, 0, hidden, F);
                for (int64_t i = 0; i < row.queries * F; i += kLanes) store(room.hidden + i, gelu(load(hidden + i), nullptr));
                multiply(row.queries, D, F, rows_of(room.hidden, F), {turned.down.data(), D}, w.down_bias, 0, room.change, D);
                for (int64_t i = 0; i < row.queries; ++i)
                    dropout.apply(room.change + i * D, D, row.feed_key, row.from_end(i), middle + i * D,
                                  out + (row.query + i) * D);
            }
    }
}

// grad_x [tokens, D], and the gradients of all weights one after the other in `grads`, in the order of Weights.
void encoder_block_backward(const Shape* shape, const Rows* rows_in, const Weights* weights, const float* x,
                            const Kept* kept, const float* grad_out, float* grad_x, float* grads) {
    const Shape& s = *shape;
    const Rows& rows = *rows_in;
    const Weights& w = *weights;
    const int64_t D = s.D, F = s.F;
    const Dropout dropout{s.dropout};
    const auto starts = parts_of(rows, s);
    const int64_t parts = static_cast<int64_t>(starts.size()) - 1;
    const int64_t sizes[] = {D, D, 3 * D * D, 3 * D, D * D, D, D, D, F * D, F, D * F, D};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    const int64_t by_down_first = total - D - D * F;
    std::vector<float> sums(parts * total);
    const Panels down(w.down, D, F, F, 1);
#pragma omp parallel
    {
        Room room(s, rows.longest);
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < parts; ++part) {
            float* at = sums.data() + part * total;
            float* g[12];
            for (int i = 0; i < 12; ++i) g[i] = at, at += sizes[i];
            float* by_down = g[10];  // as [F, D]
            for (int64_t b = starts[part]; b < starts[part + 1]; ++b) {
                const Row row(rows, s, b);
                const int64_t M = row.queries, L = row.length;
                if (!M) {
                    std::memset(grad_x + row.first * D, 0, L * D * sizeof(float));
                    continue;
                }
                const Kept k = room.of(*kept, row, s);
                const float *by_out = grad_out + row.query * D, *middle = k.middle;
                // feed-forward
                for (int64_t i = 0; i < M; ++i)
                    dropout.apply(by_out + i * D, D, row.feed_key, row.from_end(i), nullptr, room.change + i * D);
                add_rows(room.change, M, D, D, g[11]);
                const float* hidden = k.hidden;
                for (int64_t i = 0; i < M * F; i += kLanes) {
                    Lanes slope;
                    store(room.hidden + i, gelu(load(hidden + i), &slope));
                    store(room.slope + i, slope);
                }
                multiply(F, D, M, columns_of(room.hidden, F), {room.change, D}, by_down, D, by_down, D);
                multiply(M, F, D, rows_of(room.change, D), down, nullptr, 0, room.hidden, F);
                for (int64_t i = 0; i < M * F; i += kLanes) store(room.hidden + i, load(room.hidden + i) * load(room.slope + i));
                add_rows(room.hidden, M, F, F, g[9]);
                normalize(middle, M, D, w.feed_scale, w.feed_shift, room.normed);
                multiply(F, D, M, columns_of(room.hidden, F), {room.normed, D}, g[8], D, g[8], D);
                multiply(M, D, F, rows_of(room.hidden, F), {w.up, D}, nullptr, 0, room.change, D);
                float* by_middle = room.asked;
                normalize_backward(middle, room.change, M, D, w.feed_scale, by_out, by_middle, g[6], g[7]);
                // attention
                for (int64_t i = 0; i < M; ++i)
                    dropout.apply(by_middle + i * D, D, row.attention_key, row.from_end(i), nullptr, room.change + i * D);
                add_rows(room.change, M, D, D, g[5]);
                multiply(D, D, M, columns_of(room.change, D), {k.attended, D}, g[4], D, g[4], D);
                multiply(M, D, D, rows_of(room.change, D), {w.out, D}, nullptr, 0, room.hidden, D);
                attend_backward(s, row, k, room.hidden, room);
                add_rows(room.by_query, M, D, D, g[3]);
                add_rows(room.by_kv, L, 2 * D, 2 * D, g[3] + D);
                const float* own = x + row.first * D;
                normalize(own, L, D, w.norm_scale, w.norm_shift, room.normed);
                multiply(D, D, M, columns_of(room.by_query, D), {row.asked(room.normed, D, room.hidden), D}, g[2], D, g[2], D);
                multiply(2 * D, D, L, columns_of(room.by_kv, 2 * D), {room.normed, D}, g[2] + D * D, D, g[2] + D * D, D);
                multiply(L, D, 2 * D, rows_of(room.by_kv, 2 * D), {w.qkv + D * D, D}, nullptr, 0, room.change, D);
                if (!row.places) {
                    multiply(M, D, D, rows_of(room.by_query, D), {w.qkv, D}, room.change, D, room.change, D);
                } else {
                    multiply(M, D, D, rows_of(room.by_query, D), {w.qkv, D}, nullptr, 0, room.hidden, D);
                    for (int64_t i = 0; i < M; ++i) add_rows(room.hidden + i * D, 1, D, D, room.change + row.place(i) * D);
                }
                float* to = grad_x + row.first * D;
                normalize_backward(own, room.change, L, D, w.norm_scale, row.places ? nullptr : by_middle, to, g[0], g[1]);
                if (row.places)
                    for (int64_t i = 0; i < M; ++i) add_rows(by_middle + i * D, 1, D, D, to + row.place(i) * D);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < total; ++i) {
            float sum = 0;
            for (int64_t part = 0; part < parts; ++part) sum += sums[part * total + i];
            const int64_t at = i - by_down_first;
            grads[at < 0 || at >= D * F ? i : by_down_first + at % D * F + at / D] = sum;
        }
    }
}

// to [tokens, D] = x with elements dropped, by rows and places; its own gradient as well.
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
