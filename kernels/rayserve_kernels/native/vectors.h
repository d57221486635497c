// Vectors of floats as wide as the flags of the compilation allow, and what attention does to them.
//
// Contraction is switched off where this is compiled, and `multiply_add` fuses explicitly: a row's
// bits must not depend on which instantiation of a template computed it.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace rayserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
// What lies in memory is aligned to its elements alone.
typedef float VecInMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

static inline Vec load(const float* from) { return *reinterpret_cast<const VecInMemory*>(from); }

static inline void store(float* to, Vec value) { *reinterpret_cast<VecInMemory*>(to) = value; }

static inline Vec spread(float value) { return value - Vec{}; }

static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static inline Vec choose(Ints mask, Vec yes, Vec no) {
  return (Vec)((mask & (Ints)yes) | (~mask & (Ints)no));
}

static inline Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }

// exp of what is at most 0: 1 at 0 exactly, 0 below -87, NaN of NaN; elsewhere within 2 ulp.
// Range reduction and polynomial as in the Cephes library's expf.
static inline Vec exp_of_negative(Vec x) {
  const Vec magic = spread(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer.
  const Vec shifted = multiply_add(x, spread(1.44269504088896341f), magic);
  const Vec power = shifted - magic;
  Vec rest = multiply_add(power, spread(-0.693359375f), x);
  rest = multiply_add(power, spread(2.12194440e-4f), rest);
  Vec sum = spread(1.9875691500e-4f);
  sum = multiply_add(sum, rest, spread(1.3981999507e-3f));
  sum = multiply_add(sum, rest, spread(8.3334519073e-3f));
  sum = multiply_add(sum, rest, spread(4.1665795894e-2f));
  sum = multiply_add(sum, rest, spread(1.6666665459e-1f));
  sum = multiply_add(sum, rest, spread(5.0000001201e-1f));
  sum = multiply_add(sum, rest * rest, rest + spread(1.0f));
  const Words exponent = (Words)shifted - (Words)magic + 127u;
  const Vec scaled = sum * (Vec)(exponent << 23);
  return choose(x < spread(-87.0f), Vec{}, scaled);
}

template <int... Index>
static inline Vec shuffle(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index...);
#else
  return __builtin_shuffle(a, b, Ints{Index...});
#endif
}

// Lane `lane` of the interleaving of two vectors, quarter by quarter of 128 bits: `first` of each
// quarter of a and b in turn, then `second`.
constexpr int interleaved(int lane, int first, int second) {
  return lane / 4 * 4 + (lane % 4 < 2 ? first : second) + (lane % 2) * kLanes;
}

constexpr int paired(int lane, int first) {
  return lane / 4 * 4 + first + lane % 2 + (lane % 4 < 2 ? 0 : kLanes);
}

template <int... Lane>
static inline Vec sums_of_four(Vec a, Vec b, Vec c, Vec d, std::integer_sequence<int, Lane...>) {
  const Vec ab = shuffle<interleaved(Lane, 0, 1)...>(a, b) + shuffle<interleaved(Lane, 2, 3)...>(a, b);
  const Vec cd = shuffle<interleaved(Lane, 0, 1)...>(c, d) + shuffle<interleaved(Lane, 2, 3)...>(c, d);
  Vec sums = shuffle<paired(Lane, 0)...>(ab, cd) + shuffle<paired(Lane, 2)...>(ab, cd);
  if constexpr (kLanes >= 16) sums += shuffle<((Lane + 8) % kLanes)...>(sums, sums);
  if constexpr (kLanes >= 8) sums += shuffle<((Lane + 4) % kLanes)...>(sums, sums);
  return sums;
}

// Write the sums over the lanes of four vectors. Each is added up in the same order.
static inline void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
  const Vec sums = sums_of_four(a, b, c, d, std::make_integer_sequence<int, kLanes>{});
  std::memcpy(to, &sums, 4 * sizeof(float));
}

static inline float sum_of(Vec value) {
  float sums[4];
  store_sums(sums, value, Vec{}, Vec{}, Vec{});
  return sums[0];
}

static inline float largest_of(Vec value) {
  float largest = value[0];
  for (int lane = 1; lane < kLanes; lane++) largest = value[lane] > largest ? value[lane] : largest;
  return largest;
}

// Within 2^-22 of the true one; NaN of NaN.
static inline Vec tanh_of(Vec x) {
  const Words sign = (Words)x & 0x80000000u;
  const Vec magnitude = (Vec)((Words)x & 0x7fffffffu);
  const Vec power = exp_of_negative(magnitude * spread(-2.0f));
  const Vec result = (spread(1.0f) - power) / (spread(1.0f) + power);
  return (Vec)((Words)result | sign);
}

}  // namespace rayserve
