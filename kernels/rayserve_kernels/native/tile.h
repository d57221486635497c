// One tile of keys and values against some rows of queries, by online softmax.
//
// A tile is kTile positions from a multiple of kTile on. What a row computes over a tile does not
// depend on the other rows, nor on which rows are computed with it: the order of every sum is fixed.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstddef>

#include "formats.h"

namespace rayserve {

constexpr int kTile = 64;
constexpr float kHidden = -FLT_MAX;  // The score of a hidden position, and the maximum of none.
// As many rows at a time as their sums find registers for.
constexpr int kRowsAtOnce = kLanes == 16 ? 4 : 2;

typedef const char* Place;  // Of a vector in memory; null where no query of the task sees it.

// While a line of one tile is read, the same line of the next tile is fetched: blocks are too short
// for the processor to foresee them, and it drops or stalls on more requests at once than it can
// hold. `next` has as many vectors as a tile, or is null where nothing is to be fetched.
// Inlined by force: GCC takes a function that only fetches for one without effect, and drops it.
__attribute__((always_inline)) static inline void fetch(const Place* next, int vector, int byte) {
  if (next != nullptr && byte % 64 == 0) __builtin_prefetch(next[vector] + byte, 0, 2);
}

// How products are made: of floats, or of pairs of bfloat16 into floats.
struct ByFloats {
  typedef float Element;
  static constexpr int kStep = kLanes;  // Widths are multiples of it.

  static void write_weights(float* scores, int at, Vec weights) { store(scores + at, weights); }
  static Vec rounded(Vec weights) { return weights; }

  // Element d of an output lies at d.
  static void take_outputs(float* to, const float* from, int at) {
    store(to, load(from + at));
  }
};

// Rows of queries (`width` elements each, zeros beyond head_dim), and what they have gathered.
struct Rows {
  int count;
  int width;
  const void* queries;  // Of the elements by which products are made.
  float* outputs;   // [count, width]: sum of exp(score - largest) * value, in the order of products
  float* largest;   // [count]
  float* total;     // [count]: sum of exp(score - largest)
  float* scores;    // [count, kTile], of the tile in hand; then its weights
  float* rescale;   // [count], of the tile in hand
};

template <typename S, int kRows>
static void score_rows(
    ByFloats, const Rows& rows, int first, const Place* keys, int num_keys, const Place* next) {
  const int width = rows.width;
  const float* queries = static_cast<const float*>(rows.queries) + first * width;
  for (int i = 0; i < num_keys; i += 4) {
    Vec sums[kRows][4] = {};
    for (int d = 0; d < width; d += kLanes) {
      Vec key[4];
      for (int j = 0; j < 4; j++) {
        fetch(next, i + j, d * sizeof(S));
        key[j] = load(reinterpret_cast<const S*>(keys[i + j]) + d);
      }
      for (int r = 0; r < kRows; r++) {
        const Vec query = load(queries + r * width + d);
        for (int j = 0; j < 4; j++) sums[r][j] = multiply_add(query, key[j], sums[r][j]);
      }
    }
    for (int r = 0; r < kRows; r++) {
      float* to = rows.scores + (first + r) * kTile + i;
      store_sums(to, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
  }
}

template <typename S, int kRows, int kVecs>
static void add_values(
    ByFloats, const Rows& rows, int first, const Place* values, int num_values, int offset,
    const Place* next) {
  const int width = rows.width;
  float* outputs = rows.outputs + first * width + offset;
  const float* weights = rows.scores + first * kTile;
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; r++) {
    const Vec rescale = spread(rows.rescale[first + r]);
    for (int v = 0; v < kVecs; v++) sums[r][v] = load(outputs + r * width + v * kLanes) * rescale;
  }
  for (int j = 0; j < num_values; j++) {
    const S* from = reinterpret_cast<const S*>(values[j]) + offset;
    Vec value[kVecs];
    for (int v = 0; v < kVecs; v++) {
      fetch(next, j, (offset + v * kLanes) * sizeof(S));
      value[v] = load(from + v * kLanes);
    }
    for (int r = 0; r < kRows; r++) {
      const Vec weight = spread(weights[r * kTile + j]);
      for (int v = 0; v < kVecs; v++) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVecs; v++) store(outputs + r * width + v * kLanes, sums[r][v]);
}

// Turn the scores of the tile into weights, and move `largest` and `total` on.
template <typename By>
static void weigh(const Rows& rows) {
  for (int r = 0; r < rows.count; r++) {
    float* scores = rows.scores + r * kTile;
    Vec most = load(scores);
    for (int i = kLanes; i < kTile; i += kLanes) most = larger(load(scores + i), most);
    const float before = rows.largest[r];
    const float tile_largest = largest_of(most);
    const float now = tile_largest > before ? tile_largest : before;
    Vec sums = Vec{};
    for (int i = 0; i < kTile; i += kLanes) {
      const Vec score = load(scores + i);
      const Vec exact = choose(score == spread(kHidden), Vec{}, exp_of_negative(score - spread(now)));
      // Rounded as it will be multiplied, so that the weights of a row add up to one.
      const Vec weight = By::rounded(exact);
      By::write_weights(scores, i, weight);
      sums += weight;
    }
    const float rescale = exp_of_negative(spread(before - now))[0];
    rows.rescale[r] = rescale;
    rows.total[r] = rows.total[r] * rescale + sum_of(sums);
    rows.largest[r] = now;
  }
}

// Score rows from `first` on, kRows of them or as many as are left.
template <typename By, typename S, int kRows>
static void score_all(
    const Rows& rows, int first, const Place* keys, int num_keys, const Place* next) {
  if constexpr (kRows > 1) {
    if (rows.count - first < kRows)
      return score_all<By, S, kRows - 1>(rows, first, keys, num_keys, next);
  }
  score_rows<S, kRows>(By(), rows, first, keys, num_keys, next);
}

// Likewise, add to their outputs the values by their weights.
template <typename By, typename S, int kRows>
static void add_up(
    const Rows& rows, int first, const Place* values, int num_values, const Place* next) {
  if constexpr (kRows > 1) {
    if (rows.count - first < kRows)
      return add_up<By, S, kRows - 1>(rows, first, values, num_values, next);
  }
  constexpr int kVecs = 4;
  int offset = 0;
  for (; offset + kVecs * kLanes <= rows.width; offset += kVecs * kLanes)
    add_values<S, kRows, kVecs>(By(), rows, first, values, num_values, offset, next);
  if (offset + 2 * kLanes <= rows.width) {
    add_values<S, kRows, 2>(By(), rows, first, values, num_values, offset, next);
    offset += 2 * kLanes;
  }
  if constexpr (By::kStep == kLanes) {
    if (offset < rows.width)
      add_values<S, kRows, 1>(By(), rows, first, values, num_values, offset, next);
  }
}

// Join to `rows` what they gathered from later positions.
static void merge(const Rows& rows, const float* outputs, const float* largest, const float* total) {
  for (int r = 0; r < rows.count; r++) {
    const float before = rows.largest[r];
    const float now = largest[r] > before ? largest[r] : before;
    const float own = exp_of_negative(spread(before - now))[0];
    const float other = exp_of_negative(spread(largest[r] - now))[0];
    for (int d = 0; d < rows.width; d += kLanes) {
      float* to = rows.outputs + r * rows.width + d;
      const Vec more = load(outputs + r * rows.width + d);
      store(to, multiply_add(more, spread(other), load(to) * spread(own)));
    }
    rows.total[r] = rows.total[r] * own + total[r] * other;
    rows.largest[r] = now;
  }
}

}  // namespace rayserve
