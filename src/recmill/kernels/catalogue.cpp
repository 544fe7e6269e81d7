// Cross-entropy over a catalogue, with its gradients, in one go. Float32, row-major; M queries, V items, D dims.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>
#include <omp.h>

#include "product.h"

namespace {

constexpr int64_t kUnit = 2 * kLanes;  // queries of one thread at once; their scores lie as [V, kUnit]
constexpr int64_t kItems = 128;        // at once: their rows stay in the first cache
constexpr int64_t kScores = 1 << 23;   // of all units that are under way together, if more than one a thread

}  // namespace

extern "C" {

// losses [M] = weights * cross-entropy(asked weight' + bias, answers) with label smoothing, and the gradients of their sum:
// by_asked [M, D] is set, by_weight [V, D] and by_bias [V] are added to. D is a multiple of 16. The order of all sums is
// that of queries and items, whatever the number of threads.
void catalogue_loss(const float* asked, const float* weight, const float* bias, const int64_t* answers,
                    const float* weights, int64_t M, int64_t V, int64_t D, float smoothing, float* losses,
                    float* by_asked, float* by_weight, float* by_bias) {
    const int64_t threads = omp_get_max_threads(), units = (M + kUnit - 1) / kUnit;
    const int64_t together = std::min(units, std::max(threads, std::min(4 * threads, kScores / (kUnit * V))));
    std::vector<float> scores_of_all(together * V * kUnit), padded(together * kUnit * D);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> turned(D * kUnit), by_unit(kUnit * D);
        for (int64_t first_unit = 0; first_unit < units; first_unit += together) {
            const int64_t here = std::min(together, units - first_unit);
#pragma omp for schedule(dynamic, 1)
            for (int64_t u = 0; u < here; ++u) {
                const int64_t first = (first_unit + u) * kUnit, count = std::min(kUnit, M - first);
                float *x = padded.data() + u * kUnit * D, *scores = scores_of_all.data() + u * V * kUnit;
                std::memcpy(x, asked + first * D, count * D * sizeof(float));
                std::memset(x + count * D, 0, (kUnit - count) * D * sizeof(float));
                for (int64_t i = 0; i < kUnit; ++i)
                    for (int64_t d = 0; d < D; ++d) turned[d * kUnit + i] = x[i * D + d];
                multiply(V, kUnit, D, rows_of(weight, D), {turned.data(), kUnit}, nullptr, 0, scores, kUnit);
                Lanes most[2] = {Lanes{} - INFINITY, Lanes{} - INFINITY}, sum[2] = {}, plain[2] = {};
                for (int64_t v = 0; v < V; ++v)
                    for (int half = 0; half < 2; ++half) {
                        const Lanes score = load(scores + v * kUnit + half * kLanes) + bias[v];
                        store(scores + v * kUnit + half * kLanes, score);
                        most[half] = score > most[half] ? score : most[half];
                        plain[half] += score;
                    }
                float wanted[kUnit] = {};
                for (int64_t i = 0; i < count; ++i) wanted[i] = scores[answers[first + i] * kUnit + i];
                for (int64_t v = 0; v < V; ++v)
                    for (int half = 0; half < 2; ++half) {
                        const Lanes e = exp_of(load(scores + v * kUnit + half * kLanes) - most[half]);
                        store(scores + v * kUnit + half * kLanes, e);
                        sum[half] += e;
                    }
                Lanes factor[2] = {}, everyone[2] = {};
                for (int64_t i = 0; i < count; ++i) {
                    const float own = weights[first + i], total = sum[i / kLanes][i % kLanes];
                    losses[first + i] = own * (most[i / kLanes][i % kLanes] + std::log(total) - (1 - smoothing) * wanted[i] -
                                               smoothing * plain[i / kLanes][i % kLanes] / V);
                    factor[i / kLanes][i % kLanes] = own / total;
                    everyone[i / kLanes][i % kLanes] = own * smoothing / V;
                }
                std::fill(by_unit.begin(), by_unit.end(), 0.0f);
                for (int64_t v = 0; v < V; ++v)
                    for (int half = 0; half < 2; ++half) {
                        float* at = scores + v * kUnit + half * kLanes;
                        store(at, load(at) * factor[half] - everyone[half]);
                    }
                for (int64_t i = 0; i < count; ++i) scores[answers[first + i] * kUnit + i] -= weights[first + i] * (1 - smoothing);
                for (int64_t v = 0; v < V; v += kItems)
                    multiply(kUnit, D, std::min(kItems, V - v), columns_of(scores + v * kUnit, kUnit), {weight + v * D, D},
                             by_unit.data(), D, by_unit.data(), D);
                std::memcpy(by_asked + first * D, by_unit.data(), count * D * sizeof(float));
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t v = 0; v < V; v += kItems)
                for (int64_t u = 0; u < here; ++u) {
                    const int64_t items = std::min(kItems, V - v);
                    const float* scores = scores_of_all.data() + (u * V + v) * kUnit;
                    multiply(items, D, kUnit, rows_of(scores, kUnit), {padded.data() + u * kUnit * D, D}, by_weight + v * D, D,
                             by_weight + v * D, D);
                    for (int64_t i = 0; i < items; ++i)
                        by_bias[v + i] += sum_of(load(scores + i * kUnit) + load(scores + i * kUnit + kLanes));
                }
        }
    }
}

}  // extern "C"
