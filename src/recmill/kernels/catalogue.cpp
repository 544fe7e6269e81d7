// Cross-entropy over a catalogue together with its gradients. Float32, row-major; M queries, V items, D dims.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>
#include <omp.h>

#include "product.h"

namespace {

constexpr int64_t kUnit = 2 * kLanes;  // queries that a thread processes together; their scores are [V, kUnit]
constexpr int64_t kItems = 128;        // items whose rows fit into the first-level cache
constexpr int64_t kScores = 1 << 23;   // scores in memory at once, unless one unit per thread has more

struct Unit {  // up to kUnit queries
    const int64_t* answers;
    const float* weights;
    int64_t count;
};

struct Seen {  // the items before query i: tokens[begins[i]] to tokens[ends[i] - 1], counted from 1; none if null
    const int64_t *tokens, *begins, *ends;
};

// Gives the seen items of each query a probability of 0, except its answer.
void exclude(const Seen& seen, int64_t V, const Unit& unit, float* scores) {
    for (int64_t i = 0; i < unit.count; ++i)
        for (int64_t n = seen.begins[i]; n < seen.ends[i]; ++n) {
            const int64_t item = seen.tokens[n] - 1;
            if (item >= 0 && item < V && item != unit.answers[i]) scores[item * kUnit + i] = -INFINITY;
        }
}

// Computes the losses from scores [V, kUnit] without bias, and replaces the scores by the gradient of the losses.
void softmax_gradient(const float* bias, int64_t V, const Unit& unit, float smoothing, float* scores, float* losses) {
    Lanes largest[2] = {Lanes{} - INFINITY, Lanes{} - INFINITY}, sum[2] = {}, score_sum[2] = {};
    for (int64_t v = 0; v < V; ++v)
        for (int half = 0; half < 2; ++half) {
            const Lanes score = load(scores + v * kUnit + half * kLanes) + bias[v];
            store(scores + v * kUnit + half * kLanes, score);
            largest[half] = score > largest[half] ? score : largest[half];
            score_sum[half] += score;
        }
    float answer_score[kUnit] = {};
    for (int64_t i = 0; i < unit.count; ++i) answer_score[i] = scores[unit.answers[i] * kUnit + i];
    for (int64_t v = 0; v < V; ++v)
        for (int half = 0; half < 2; ++half) {
            const Lanes e = exp_of(load(scores + v * kUnit + half * kLanes) - largest[half]);
            store(scores + v * kUnit + half * kLanes, e);
            sum[half] += e;
        }
    Lanes factor[2] = {}, smoothed[2] = {};
    for (int64_t i = 0; i < unit.count; ++i) {
        const int64_t half = i / kLanes, lane = i % kLanes;
        const float weight = unit.weights[i], total = sum[half][lane];
        const float mean_term = smoothing > 0 ? smoothing * score_sum[half][lane] / V : 0;  // the sum may be -inf
        losses[i] = weight * (largest[half][lane] + std::log(total) - (1 - smoothing) * answer_score[i] - mean_term);
        factor[half][lane] = weight / total;
        smoothed[half][lane] = weight * smoothing / V;
    }
    for (int64_t v = 0; v < V; ++v)
        for (int half = 0; half < 2; ++half) {
            float* at = scores + v * kUnit + half * kLanes;
            store(at, load(at) * factor[half] - smoothed[half]);
        }
    for (int64_t i = 0; i < unit.count; ++i) scores[unit.answers[i] * kUnit + i] -= unit.weights[i] * (1 - smoothing);
}

}  // namespace

extern "C" {

// losses [M] = weights * cross-entropy(queries weight' + bias, answers) with label smoothing. The gradients of their sum
// are written to grad_queries [M, D], and added to grad_weight [V, D] and grad_bias [V]. D is a multiple of 16. Without
// smoothing, the items that queries have seen may be excluded (`Seen`). Results do not depend on the number of threads.
void catalogue_loss(const float* queries, const float* weight, const float* bias, const int64_t* answers,
                    const float* weights, int64_t M, int64_t V, int64_t D, float smoothing, const int64_t* tokens,
                    const int64_t* seen_begins, const int64_t* seen_ends, float* losses,
                    float* grad_queries, float* grad_weight, float* grad_bias) {
    const int64_t threads = omp_get_max_threads(), units = (M + kUnit - 1) / kUnit;
    const int64_t concurrent = std::min(units, std::max(threads, std::min(4 * threads, kScores / (kUnit * V))));
    std::vector<float> all_scores(concurrent * V * kUnit), padded(concurrent * kUnit * D);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> transposed(D * kUnit), unit_grad(kUnit * D);
        for (int64_t first_unit = 0; first_unit < units; first_unit += concurrent) {
            const int64_t num_units = std::min(concurrent, units - first_unit);
#pragma omp for schedule(dynamic, 1)
            for (int64_t u = 0; u < num_units; ++u) {
                const int64_t first = (first_unit + u) * kUnit, count = std::min(kUnit, M - first);
                float *x = padded.data() + u * kUnit * D, *scores = all_scores.data() + u * V * kUnit;
                std::memcpy(x, queries + first * D, count * D * sizeof(float));
                std::memset(x + count * D, 0, (kUnit - count) * D * sizeof(float));
                for (int64_t i = 0; i < kUnit; ++i)
                    for (int64_t d = 0; d < D; ++d) transposed[d * kUnit + i] = x[i * D + d];
                multiply(V, kUnit, D, rows_of(weight, D), {transposed.data(), kUnit}, scores, kUnit);
                const Unit unit = {answers + first, weights + first, count};
                if (tokens) exclude({tokens, seen_begins + first, seen_ends + first}, V, unit, scores);
                softmax_gradient(bias, V, unit, smoothing, scores, losses + first);
                std::fill(unit_grad.begin(), unit_grad.end(), 0.0f);
                for (int64_t v = 0; v < V; v += kItems)
                    add_product(kUnit, D, std::min(kItems, V - v), columns_of(scores + v * kUnit, kUnit),
                                {weight + v * D, D}, unit_grad.data(), D);
                std::memcpy(grad_queries + first * D, unit_grad.data(), count * D * sizeof(float));
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t v = 0; v < V; v += kItems)
                for (int64_t u = 0; u < num_units; ++u) {
                    const int64_t items = std::min(kItems, V - v);
                    const float* scores = all_scores.data() + (u * V + v) * kUnit;
                    add_product(items, D, kUnit, rows_of(scores, kUnit), {padded.data() + u * kUnit * D, D},
                                grad_weight + v * D, D);
                    for (int64_t i = 0; i < items; ++i)
                        grad_bias[v + i] += sum_of(load(scores + i * kUnit) + load(scores + i * kUnit + kLanes));
                }
        }
    }
}

}  // extern "C"
