// The same by products of pairs of bfloat16, where the processor has them: twice as many at a time,
// and nothing to widen. Weights are rounded to bfloat16.
#pragma once

#include "tile.h"

#if defined(__AVX512BF16__)

namespace rayserve {

struct ByPairs {
  typedef BFloat16 Element;
  static constexpr int kStep = 2 * kLanes;

  static Vec rounded(Vec weights) {
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)weights);
    return (Vec)(__builtin_convertvector((Halves)halves, Words) << 16);
  }

  // Two by two, as they are multiplied; over scores that have been read.
  static void write_weights(float* scores, int at, Vec weights) {
    store_as(reinterpret_cast<BFloat16*>(scores) + at, weights);
  }

  // Values are interleaved in quarters of 128 bits, so that a step of 32 outputs has in its first
  // half elements 0 to 3, 8 to 11, ... and the others in its second.
  static void take_outputs(float* to, const float* from, int at) {
    const float* step = from + at / kStep * kStep;
    take_half(to, load(step), load(step + kLanes), at % kStep / kLanes, std::make_integer_sequence<int, kLanes>{});
  }

 private:
  static constexpr int place_of(int d) { return d / 8 * 4 + d % 4 + d % 8 / 4 * kLanes; }

  template <int... Lane>
  static void take_half(float* to, Vec low, Vec high, int half, std::integer_sequence<int, Lane...>) {
    store(to, half == 0 ? shuffle<place_of(Lane)...>(low, high)
                        : shuffle<place_of(Lane + kLanes)...>(low, high));
  }
};

static inline __m512i pairs_at(const BFloat16* from) { return _mm512_loadu_si512(from); }

template <typename S, int kRows>
static void score_rows(
    ByPairs, const Rows& rows, int first, const Place* keys, int num_keys, const Place* next) {
  const int width = rows.width;
  const BFloat16* queries = static_cast<const BFloat16*>(rows.queries) + first * width;
  for (int i = 0; i < num_keys; i += 4) {
    __m512 sums[kRows][4] = {};
    for (int d = 0; d < width; d += ByPairs::kStep) {
      __m512bh key[4];
      for (int j = 0; j < 4; j++) {
        fetch(next, i + j, d * sizeof(BFloat16));
        key[j] = (__m512bh)pairs_at(reinterpret_cast<const BFloat16*>(keys[i + j]) + d);
      }
      for (int r = 0; r < kRows; r++) {
        const auto query = (__m512bh)pairs_at(queries + r * width + d);
        for (int j = 0; j < 4; j++) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], query, key[j]);
      }
    }
    for (int r = 0; r < kRows; r++) {
      float* to = rows.scores + (first + r) * kTile + i;
      store_sums(to, (Vec)sums[r][0], (Vec)sums[r][1], (Vec)sums[r][2], (Vec)sums[r][3]);
    }
  }
}

// Values are taken two by two; the weight of one beyond the last is 0, and zeros lie at its place.
template <typename S, int kRows, int kVecs>
static void add_values(
    ByPairs, const Rows& rows, int first, const Place* values, int num_values, int offset,
    const Place* next) {
  const int width = rows.width;
  float* outputs = rows.outputs + first * width + offset;
  const char* weights = reinterpret_cast<const char*>(rows.scores + first * kTile);
  __m512 sums[kRows][kVecs];
  for (int r = 0; r < kRows; r++) {
    const Vec rescale = spread(rows.rescale[first + r]);
    for (int v = 0; v < kVecs; v++)
      sums[r][v] = (__m512)(load(outputs + r * width + v * kLanes) * rescale);
  }
  for (int j = 0; j < num_values; j += 2) {
    const BFloat16* one = reinterpret_cast<const BFloat16*>(values[j]) + offset;
    const BFloat16* other = reinterpret_cast<const BFloat16*>(values[j + 1]) + offset;
    __m512bh value[kVecs];
    for (int v = 0; v < kVecs; v += 2) {
      fetch(next, j, (offset + v * kLanes) * sizeof(BFloat16));
      fetch(next, j + 1, (offset + v * kLanes) * sizeof(BFloat16));
      const __m512i a = pairs_at(one + v * kLanes), b = pairs_at(other + v * kLanes);
      value[v] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      value[v + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    for (int r = 0; r < kRows; r++) {
      int32_t pair;
      std::memcpy(&pair, weights + r * kTile * sizeof(float) + j * sizeof(BFloat16), sizeof(pair));
      const auto weight = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < kVecs; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weight, value[v]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVecs; v++) store(outputs + r * width + v * kLanes, (Vec)sums[r][v]);
}

}  // namespace rayserve

#endif
