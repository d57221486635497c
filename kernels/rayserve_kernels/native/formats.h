// The formats of elements in memory: how a vector of them becomes floats, and a float one of them.
#pragma once

#include "vectors.h"

namespace rayserve {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
struct Float8E4M3 {  // Without infinities; NaN where all bits but the sign are set.
  uint8_t bits;
};

// What lies in memory is aligned to its elements alone.
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint16_t HalvesInMemory __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint8_t BytesInMemory __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef int8_t SignedBytesInMemory __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Of IEEE half precision.
static inline Vec floats_of(Halves halves) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)halves);
#else
  const auto words = __builtin_convertvector(halves, Words);
  const Words magnitude = (words & 0x7fffu) << 13;
  const Words sign = (words & 0x8000u) << 16;
  const Words finite = (Words)((Vec)magnitude * spread(0x1p112f));
  const Words is_finite = (Words)(magnitude < (0x7c00u << 13));
  return (Vec)(sign | (finite & is_finite) | ((magnitude | 0x7f800000u) & ~is_finite));
#endif
}

static inline Vec load(const BFloat16* from) {
  const auto halves = *reinterpret_cast<const HalvesInMemory*>(from);
  return (Vec)(__builtin_convertvector(halves, Words) << 16);
}

static inline Vec load(const Float16* from) {
  return floats_of((Halves)*reinterpret_cast<const HalvesInMemory*>(from));
}

// By intrinsics, since GCC widens bytes to words in pieces.
static inline Vec load(const Int8* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return __builtin_convertvector((Ints)_mm512_maskz_cvtepi8_epi32(0xffff, bytes), Vec);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return __builtin_convertvector((Ints)_mm256_cvtepi8_epi32(bytes), Vec);
#else
  const auto bytes = *reinterpret_cast<const SignedBytesInMemory*>(from);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Vec);
#endif
}

// By way of half precision, which holds a 256th of each such number.
static inline Vec load(const Float8E4M3* from) {
  const auto bytes = __builtin_convertvector(*reinterpret_cast<const BytesInMemory*>(from), Halves);
  const Halves magnitude = bytes & (uint16_t)0x7f;
  const Halves is_nan = (Halves)(magnitude == (uint16_t)0x7f) & (uint16_t)0x7fff;
  const Halves sign = (bytes & (uint16_t)0x80) << 8;
  return floats_of(sign | (magnitude << 7) | is_nan) * spread(256.0f);
}

static inline float to_float(float value) { return value; }

// Of one element; the same as `load` gives.
template <typename T>
static inline float to_float(T value) {
  T padded[kLanes] = {};
  padded[0] = value;
  return load(padded)[0];
}

static inline void store_as(float* to, Vec value) { store(to, value); }

// Rounds to nearest, ties to even; a NaN stays one.
static inline void store_as(BFloat16* to, Vec value) {
  const Words bits = (Words)value;
  const Words is_nan = (Words)(value != value);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words chosen = (rounded & ~is_nan) | (0x7fc0u & is_nan);
  *reinterpret_cast<HalvesInMemory*>(to) = __builtin_convertvector(chosen, Halves);
}

// Likewise; what is too large becomes infinite.
static inline void store_as(Float16* to, Vec value) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  *reinterpret_cast<HalvesInMemory*>(to) = (Halves)halves;
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  *reinterpret_cast<HalvesInMemory*>(to) = (Halves)halves;
#else
  const Words sign = ((Words)value >> 16) & 0x8000u;
  const Words magnitude = (Words)value & 0x7fffffffu;
  const Words is_nan = (Words)(magnitude > 0x7f800000u);
  const Words is_large = (Words)(magnitude >= 0x477ff000u);  // From where it rounds to 2^16 on.
  const Words is_small = (Words)(magnitude < 0x38800000u);   // Below 2^-14.
  // Adding a half makes the hardware round at the last bit that a small one keeps.
  const Words small = (Words)((Vec)magnitude + spread(0.5f)) - 0x3f000000u;
  const Words odd = (magnitude >> 13) & 1u;
  const Words normal = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
  const Words finite = (small & is_small) | (normal & ~is_small);
  const Words infinite = (0x7e00u & is_nan) | (0x7c00u & ~is_nan);
  const Words chosen = sign | (finite & ~is_large) | (infinite & is_large);
  *reinterpret_cast<HalvesInMemory*>(to) = __builtin_convertvector(chosen, Halves);
#endif
}

// One element.
template <typename T>
static inline T as(float value) {
  T some[kLanes];
  store_as(some, spread(value));
  return some[0];
}

}  // namespace rayserve
