// Vectors of sixteen floats. The compiler uses several registers where one is too small.
#pragma once

#include <cstdint>

namespace {

constexpr int kLanes = 16;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t LaneInts __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));
typedef uint32_t LaneBits __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4), may_alias));

inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes values) { *reinterpret_cast<Lanes*>(to) = values; }

inline float sum_of(Lanes values) {
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += values[i];
    return total;
}

inline float max_of(Lanes values) {
    float largest = values[0];
    for (int i = 1; i < kLanes; ++i) largest = values[i] > largest ? values[i] : largest;
    return largest;
}

// e^x with an error of at most 2 ulp; 0 below -87, where results would be denormal. NaN stays NaN.
inline Lanes exp_of(Lanes x) {
    const Lanes capped = x > 88.0f ? Lanes{} + 88.0f : x;
    const Lanes safe = capped < -87.0f ? Lanes{} - 87.0f : capped;
    // e^x = 2^n e^r with r in [-ln 2 / 2, ln 2 / 2]. n ln 2 is subtracted in two parts to keep all digits. Adding
    // 1.5 * 2^23 = 12582912 = 0x4B400000 rounds to an integer and leaves it in the low bits.
    const Lanes rounded = safe * 1.44269504088896341f + 12582912.0f;
    const LaneInts integer = reinterpret_cast<const LaneInts&>(rounded) - 0x4B400000, exponent = integer << 23;
    const Lanes n = __builtin_convertvector(integer, Lanes);
    const Lanes r = (safe - n * 0.693359375f) - n * -2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const LaneInts scaled = reinterpret_cast<LaneInts&>(p) + exponent;
    const Lanes result = reinterpret_cast<const Lanes&>(scaled);
    return x < -87.0f ? Lanes{} : result;
}

}  // namespace
