// What a training step of click models computes, apart from matrix products. Float32, row-major; B rows in a batch. Results
// do not depend on the number of threads, except for the last digits of bias gradients.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>

#include "lanes.h"

namespace {

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int FourInts __attribute__((vector_size(16)));

// Transposes four vectors of `dim` values: columns[k * stride + j] = v[j][k]. dim is a multiple of 4.
inline void transpose_four(const float* const* v, int64_t dim, int64_t stride, float* columns) {
    for (int64_t k = 0; k < dim; k += 4) {
        Four r[4];
        for (int i = 0; i < 4; ++i) r[i] = *reinterpret_cast<const Four*>(v[i] + k);
        const Four low = __builtin_shuffle(r[0], r[1], FourInts{0, 4, 1, 5});
        const Four low2 = __builtin_shuffle(r[2], r[3], FourInts{0, 4, 1, 5});
        const Four high = __builtin_shuffle(r[0], r[1], FourInts{2, 6, 3, 7});
        const Four high2 = __builtin_shuffle(r[2], r[3], FourInts{2, 6, 3, 7});
        Four* to[4];
        for (int i = 0; i < 4; ++i) to[i] = reinterpret_cast<Four*>(columns + (k + i) * stride);
        *to[0] = __builtin_shuffle(low, low2, FourInts{0, 1, 4, 5});
        *to[1] = __builtin_shuffle(low, low2, FourInts{2, 3, 6, 7});
        *to[2] = __builtin_shuffle(high, high2, FourInts{0, 1, 4, 5});
        *to[3] = __builtin_shuffle(high, high2, FourInts{2, 3, 6, 7});
    }
}

struct Lookup {
    int64_t row;
    int64_t bag;  // row in the batch * features + feature: its vector in the gradient
};

// Stable radix sort by row; `scratch` has the same length. With 11 bits per pass, three passes sort two billion rows.
void sort_by_row(Lookup* lookups, Lookup* scratch, int64_t count, int64_t rows) {
    if (count < 2) return;  // a table may have no rows
    constexpr int kBits = 11;
    Lookup *from = lookups, *to = scratch;
    for (int shift = 0; (rows - 1) >> shift; shift += kBits) {
        int64_t starts[(1 << kBits) + 1] = {0};
        const int64_t mask = (1 << kBits) - 1;
        for (int64_t i = 0; i < count; ++i) ++starts[((from[i].row >> shift) & mask) + 1];
        for (int64_t i = 0; i < mask; ++i) starts[i + 1] += starts[i];
        for (int64_t i = 0; i < count; ++i) to[starts[(from[i].row >> shift) & mask]++] = from[i];
        std::swap(from, to);
    }
    if (from != lookups) std::memcpy(lookups, from, count * sizeof(Lookup));
}

enum Rules { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kFtrl };

// Updates one row of `dim` weights by its gradient. `settings`: learning rate; eps; weight decay; L2; then of Adam 1 -
// beta1, 1 - beta2 and the corrections of the bias of both means; of FTRL lambda1, lambda2, beta and the first accumulator.
inline void update_row(float* w, const float* g, int64_t dim, float* s, float* s2, int64_t rule, const float* settings) {
    const float lr = settings[0], eps = settings[1], decay = lr * settings[2];
    if (decay != 0 && rule != kFtrl)
        for (int64_t k = 0; k < dim; ++k) w[k] -= decay * w[k];
    if (rule == kSgd) {
        for (int64_t k = 0; k < dim; ++k) w[k] -= lr * g[k];
    } else if (rule == kAdagrad) {
        for (int64_t k = 0; k < dim; ++k) {
            s[k] += g[k] * g[k];
            w[k] -= lr * g[k] / (std::sqrt(s[k]) + eps);
        }
    } else if (rule == kRowwiseAdagrad) {
        float squares = 0;
        for (int64_t k = 0; k < dim; ++k) squares += g[k] * g[k];
        *s += squares / dim;
        const float rate = lr / (std::sqrt(*s) + eps);
        for (int64_t k = 0; k < dim; ++k) w[k] -= rate * g[k];
    } else if (rule == kAdam) {
        const float new1 = settings[4], new2 = settings[5], rate = lr / settings[6], scale = 1 / std::sqrt(settings[7]);
        for (int64_t k = 0; k < dim; ++k) {
            s[k] += new1 * (g[k] - s[k]);
            s2[k] += new2 * (g[k] * g[k] - s2[k]);
            w[k] -= rate * s[k] / (std::sqrt(s2[k]) * scale + eps);
        }
    } else {
        const float lambda1 = settings[4], lambda2 = settings[5], beta = settings[6], first = settings[7];
        for (int64_t k = 0; k < dim; ++k) {
            const float before = std::sqrt(first + s2[k]);
            s2[k] += g[k] * g[k];
            const float after = std::sqrt(first + s2[k]);
            s[k] += g[k] - (after - before) / lr * w[k];
            const float shrunk = s[k] < 0 ? s[k] + lambda1 : s[k] - lambda1;
            const float kept = -shrunk / ((beta + after) / lr + lambda2) - decay * w[k];
            w[k] = std::fabs(s[k]) < lambda1 ? 0 : kept;
        }
    }
}

}  // namespace

extern "C" {

// Sums the rows of each bag into out [B, F * dim]. The table of feature f has rows[f] rows of `dim` floats, starting at
// weights[starts[f]]. The ids of bag b of feature f are ids[offsets[f * B + b]] up to ids[offsets[f * B + b + 1] - 1].
// Returns the index in `ids` of the first id that its table does not have, or -1.
int64_t sum_bags(const float* weights, const int64_t* starts, const int64_t* rows, int64_t F, int64_t dim,
                 const int64_t* ids, const int64_t* offsets, int64_t B, float* out) {
    constexpr int64_t kBlock = 64;
    int64_t bad = INT64_MAX;
#pragma omp parallel for schedule(static) reduction(min : bad)
    for (int64_t block = 0; block < (B + kBlock - 1) / kBlock; ++block) {
        const int64_t last = std::min(B, (block + 1) * kBlock);
        for (int64_t f = 0; f < F; ++f) {
            const float* table = weights + starts[f];
            for (int64_t b = block * kBlock; b < last; ++b) {
                float* to = out + (b * F + f) * dim;
                const int64_t first = offsets[f * B + b], end = offsets[f * B + b + 1];
                if (first == end) std::memset(to, 0, dim * sizeof(float));
                for (int64_t i = first; i < end; ++i) {
                    if (ids[i] < 0 || ids[i] >= rows[f]) {
                        bad = std::min(bad, i);
                        continue;
                    }
                    const float* row = table + ids[i] * dim;
                    if (i == first) std::memcpy(to, row, dim * sizeof(float));
                    else for (int64_t k = 0; k < dim; ++k) to[k] += row[k];
                }
            }
        }
    }
    return bad == INT64_MAX ? -1 : bad;
}

// One optimizer step of the tables; `rule` is one of the Rules above. grad [B, F * dim] is the gradient of sum_bags' out. All
// gradients of a row are summed first, by feature and in batch order. Row r of feature f has its state at
// state[state_starts[f] + r * stride], and its second state, if the rule has one, at the same place of `state2`. Features
// with the same number in `tables` share a table; they follow one another. `settings`: see `update_row`.
void update_bags(float* weights, const int64_t* starts, float* state, float* state2, const int64_t* state_starts,
                 int64_t stride, const int64_t* rows, const int64_t* tables, int64_t F, int64_t dim, const int64_t* ids,
                 const int64_t* offsets, int64_t B, const float* grad, int64_t rule, const float* settings) {
    const int64_t total = offsets[F * B];
    std::vector<Lookup> lookups(total), scratch(total);
    std::vector<int64_t> ends(F);  // of the features that share the table of feature f
    for (int64_t f = F - 1; f >= 0; --f) ends[f] = f + 1 < F && tables[f] == tables[f + 1] ? ends[f + 1] : f + 1;
    const auto is_first = [&](int64_t f) { return f == 0 || tables[f] != tables[f - 1]; };
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t f = 0; f < F; ++f) {
            if (!is_first(f)) continue;
            const int64_t first = offsets[f * B], end = offsets[ends[f] * B];
            for (int64_t g = f; g < ends[f]; ++g)
                for (int64_t b = 0; b < B; ++b)
                    for (int64_t i = offsets[g * B + b]; i < offsets[g * B + b + 1]; ++i) lookups[i] = {ids[i], b * F + g};
            sort_by_row(lookups.data() + first, scratch.data() + first, end - first, rows[f]);
        }
        std::vector<float> sum(dim);
        // This thread's share of all lookups, aligned to where a table row begins.
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t from = total * thread / threads, to = total * (thread + 1) / threads;
        for (int64_t f = 0; f < F; ++f) {
            if (!is_first(f)) continue;
            const int64_t first = offsets[f * B], end = offsets[ends[f] * B];
            int64_t i = std::max(first, from);
            if (i >= std::min(end, to)) continue;
            if (i > first)
                while (i < end && lookups[i].row == lookups[i - 1].row) ++i;
            while (i < end && i < to) {
                const int64_t row = lookups[i].row;
                const float* g = grad + lookups[i].bag * dim;
                int64_t next = i + 1;
                if (next < end && lookups[next].row == row) {
                    std::memcpy(sum.data(), g, dim * sizeof(float));
                    for (; next < end && lookups[next].row == row; ++next) {
                        const float* more = grad + lookups[next].bag * dim;
                        for (int64_t k = 0; k < dim; ++k) sum[k] += more[k];
                    }
                    g = sum.data();
                }
                float* w = weights + starts[f] + row * dim;
                if (settings[3] != 0) {  // the gradient of l2 / 2 * |w|^2
                    for (int64_t k = 0; k < dim; ++k) sum[k] = g[k] + settings[3] * w[k];
                    g = sum.data();
                }
                const int64_t at = stride ? state_starts[f] + row * stride : 0;
                update_row(w, g, dim, state + at, state2 + at, rule, settings);
                i = next;
            }
        }
    }
}

// out [B, width] = the dense vector, the dot products of all pairs of the N vectors (the dense one, then the bags), zeros.
// Pairs are the upper triangle, row by row, with its diagonal if `itself`. dim is a multiple of 16.
void pair_products(const float* dense, const float* bags, int64_t B, int64_t N, int64_t dim, int64_t itself,
                   int64_t width, float* out) {
    const int64_t columns = (N + kLanes - 1) / kLanes * kLanes;
#pragma omp parallel
    {
        constexpr int kRows = 6;
        std::vector<float> transposed(dim * columns), results(kRows * columns);
        float *values = transposed.data(), *products = results.data();  // values[k][j]: value k of vector j
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; ++b) {
            const float* rest = bags + b * (N - 1) * dim;
            const auto vector = [&](int64_t i) { return i ? rest + (i - 1) * dim : dense + b * dim; };
            for (int64_t j = 0; j < N; j += 4) {
                const float* v[4];
                for (int r = 0; r < 4; ++r) v[r] = vector(std::min(j + r, N - 1));
                transpose_four(v, dim, columns, values + j);
            }
            float* to = out + b * width;
            std::memcpy(to, dense + b * dim, dim * sizeof(float));
            float* pair = to + dim;
            for (int64_t first = 0; first < N; first += kRows) {
                const int count = static_cast<int>(std::min<int64_t>(kRows, N - first));
                const float* v[kRows];
                for (int r = 0; r < kRows; ++r) v[r] = vector(std::min(first + r, N - 1));
                for (int64_t c = first / kLanes * kLanes; c < columns; c += 2 * kLanes) {
                    Lanes left[kRows] = {}, right[kRows] = {};
                    const bool both = c + kLanes < columns;
                    if (both) {
                        for (int64_t k = 0; k < dim; ++k) {
                            const Lanes l = load(values + k * columns + c), h = load(values + k * columns + c + kLanes);
                            for (int r = 0; r < kRows; ++r) {
                                left[r] += v[r][k] * l;
                                right[r] += v[r][k] * h;
                            }
                        }
                    } else {
                        for (int64_t k = 0; k < dim; ++k) {
                            const Lanes l = load(values + k * columns + c);
                            for (int r = 0; r < kRows; ++r) left[r] += v[r][k] * l;
                        }
                    }
                    for (int r = 0; r < kRows; ++r) {
                        store(products + r * columns + c, left[r]);
                        if (both) store(products + r * columns + c + kLanes, right[r]);
                    }
                }
                for (int r = 0; r < count; ++r) {
                    const int64_t from = first + r + (itself ? 0 : 1);
                    std::memcpy(pair, products + r * columns + from, (N - from) * sizeof(float));
                    pair += N - from;
                }
            }
            std::memset(pair, 0, (to + width - pair) * sizeof(float));
        }
    }
}

// The gradients of `dense` and `bags` from that of pair_products' out.
void pair_products_backward(const float* dense, const float* bags, const float* grad, int64_t B, int64_t N, int64_t dim,
                            int64_t itself, int64_t width, float* grad_dense, float* grad_bags) {
#pragma omp parallel
    {
        std::vector<float> square(N * N);
        float* g = square.data();
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; ++b) {
            const float* pair = grad + b * width + dim;
            for (int64_t i = 0; i < N; ++i) {
                g[i * N + i] = itself ? 2 * *pair++ : 0;
                for (int64_t j = i + 1; j < N; ++j) g[i * N + j] = g[j * N + i] = *pair++;
            }
            const float* rest = bags + b * (N - 1) * dim;
            constexpr int kRows = 9;
            for (int64_t first = 0; first < N; first += kRows) {
                const int count = static_cast<int>(std::min<int64_t>(kRows, N - first));
                const float* factors[kRows];
                for (int r = 0; r < kRows; ++r) factors[r] = g + std::min(first + r, N - 1) * N;
                for (int64_t k = 0; k < dim; k += kLanes) {
                    Lanes sums[kRows] = {};
                    for (int64_t j = 0; j < N; ++j) {
                        const Lanes v = load((j ? rest + (j - 1) * dim : dense + b * dim) + k);
                        for (int r = 0; r < kRows; ++r) sums[r] += factors[r][j] * v;
                    }
                    for (int r = 0; r < count; ++r) {
                        const int64_t i = first + r;
                        if (i) store(grad_bags + (b * (N - 1) + i - 1) * dim + k, sums[r]);
                        else store(grad_dense + b * dim + k, sums[r] + load(grad + b * width + k));
                    }
                }
            }
        }
    }
}

// out [B, O] = max(out + bias, 0), in place.
void add_bias_relu(float* out, const float* bias, int64_t B, int64_t O) {
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < B; ++b) {
        float* row = out + b * O;
        for (int64_t o = 0; o < O; ++o) {
            const float value = row[o] + bias[o];
            row[o] = value < 0 ? 0 : value;  // NaN stays NaN
        }
    }
}

// masked [B, O] = grad where out is positive, else 0; grad_bias [O] = the sum of its rows. `masked` may be `grad` itself.
void relu_backward(const float* grad, const float* out, float* masked, float* grad_bias, int64_t B, int64_t O) {
    const int threads = omp_get_max_threads();
    std::vector<float> sums(threads * O, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        float* sum = sums.data() + omp_get_thread_num() * O;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; ++b) {
            const float *g = grad + b * O, *y = out + b * O;
            float* m = masked + b * O;
            for (int64_t o = 0; o < O; ++o) {
                const float value = y[o] <= 0 ? 0 : g[o];
                m[o] = value;
                sum[o] += value;
            }
        }
    }
    for (int64_t o = 0; o < O; ++o) {
        float total = 0;
        for (int t = 0; t < threads; ++t) total += sums[t * O + o];
        grad_bias[o] = total;
    }
}

}  // extern "C"
