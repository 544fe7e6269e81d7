// Single-threaded products of matrices that fit into the cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"

namespace {

#ifdef __AVX512F__
constexpr int kPanel = 4, kSums = 24;  // vectors in a panel of columns; sums that fit into registers
#else
constexpr int kPanel = 1, kSums = 6;
#endif

struct Left {  // element (r, k) is from[r * row + k * step]
    const float* from;
    int64_t row, step;
};

struct Right {  // columns of panel p in row k start at from[p * panel + k * row]
    const float* from;
    int64_t row, panel;
    Right(const float* start, int64_t stride, int64_t panel_stride = kPanel * kLanes)
        : from(start), row(stride), panel(panel_stride) {}
};

// R rows and V vectors of columns of the product that `multiply_onto` describes.
template <int R, int V>
inline void tile(int64_t K, Left a, const float* b, int64_t ldb, const float* init, int64_t ldi, float* c, int64_t ldc) {
    Lanes sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = init ? load(init + r * ldi + v * kLanes) : Lanes{};
    for (int64_t k = 0; k < K; ++k) {
        Lanes right[V];
        for (int v = 0; v < V; ++v) right[v] = load(b + k * ldb + v * kLanes);
        for (int r = 0; r < R; ++r) {
            const float left = a.from[r * a.row + k * a.step];
            for (int v = 0; v < V; ++v) sums[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
}

// V vectors of columns, R rows at a time; fewer at the end.
template <int R, int V>
inline void panel(int64_t M, int64_t K, Left a, const float* b, int64_t ldb, const float* init, int64_t ldi, float* c,
                  int64_t ldc) {
    int64_t m = 0;
    for (; m + R <= M; m += R)
        tile<R, V>(K, {a.from + m * a.row, a.row, a.step}, b, ldb, init ? init + m * ldi : init, ldi, c + m * ldc, ldc);
    if constexpr (R > 1)
        if (m < M)
            panel<R / 2, V>(M - m, K, {a.from + m * a.row, a.row, a.step}, b, ldb, init ? init + m * ldi : init, ldi,
                            c + m * ldc, ldc);
}

// c [M, N] = init + a [M, K] b [K, N]; N is a multiple of 16. `init` is null, c itself, or a bias (ldi = 0).
__attribute__((noinline)) void multiply_onto(const float* init, int64_t ldi, int64_t M, int64_t N, int64_t K, Left a,
                                             Right b, float* c, int64_t ldc) {
    int64_t n = 0;
    const auto columns = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        const float* from = b.from + n / (kPanel * kLanes) * b.panel + n % (kPanel * kLanes);
        panel<std::min(12, kSums / V), V>(M, K, a, from, b.row, init ? init + n : init, ldi, c + n, ldc);
        n += V * kLanes;
    };
    while (n + kPanel * kLanes <= N) columns(std::integral_constant<int, kPanel>());
    if constexpr (kPanel > 2)
        if (n + 2 * kLanes <= N) columns(std::integral_constant<int, 2>());
    while (n < N) columns(std::integral_constant<int, 1>());
}

// c = a b
inline void multiply(int64_t M, int64_t N, int64_t K, Left a, Right b, float* c, int64_t ldc) {
    multiply_onto(nullptr, 0, M, N, K, a, b, c, ldc);
}

// c += a b
inline void add_product(int64_t M, int64_t N, int64_t K, Left a, Right b, float* c, int64_t ldc) {
    multiply_onto(c, ldc, M, N, K, a, b, c, ldc);
}

inline Left rows_of(const float* from, int64_t stride) { return {from, stride, 1}; }
inline Left columns_of(const float* from, int64_t stride) { return {from, 1, stride}; }

}  // namespace
