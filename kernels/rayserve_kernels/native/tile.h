// One tile of keys and values against some rows of queries, by online softmax.
//
// A tile is kTile positions from a multiple of kTile on. What a row computes over a tile does not
// depend on the other rows, nor on which rows are computed with it: the order of every sum is fixed.
#pragma once

#include <cfloat>

#include "vectors.h"

namespace rayserve {

constexpr int kTile = 64;
constexpr float kHidden = -FLT_MAX;  // The score of a hidden position, and the maximum of none.
// As many rows at a time as their sums find registers for.
constexpr int kRowsAtOnce = kLanes == 16 ? 4 : 2;

// Rows of queries (scaled, `width` floats each, zeros beyond head_dim), and what they have gathered.
struct Rows {
  int count;
  int width;
  const float* queries;
  float* outputs;   // [count, width]: sum of exp(score - largest) * value
  float* largest;   // [count]
  float* total;     // [count]: sum of exp(score - largest)
  float* scores;    // [count, kTile], of the tile in hand
  float* rescale;   // [count], of the tile in hand
};

template <typename T, int kRows>
static void score_rows(const Rows& rows, int first, const T* const* keys, int num_keys) {
  const int width = rows.width;
  const float* queries = rows.queries + first * width;
  for (int i = 0; i < num_keys; i += 4) {
    Vec sums[kRows][4] = {};
    for (int d = 0; d < width; d += kLanes) {
      Vec key[4];
      for (int j = 0; j < 4; j++) key[j] = load(keys[i + j] + d);
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

template <typename T, int kRows, int kVecs>
static void add_values(
    const Rows& rows, int first, const T* const* values, int num_values, int offset) {
  const int width = rows.width;
  float* outputs = rows.outputs + first * width + offset;
  const float* weights = rows.scores + first * kTile;
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; r++) {
    const Vec rescale = spread(rows.rescale[first + r]);
    for (int v = 0; v < kVecs; v++) sums[r][v] = load(outputs + r * width + v * kLanes) * rescale;
  }
  for (int j = 0; j < num_values; j++) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; v++) value[v] = load(values[j] + offset + v * kLanes);
    for (int r = 0; r < kRows; r++) {
      const Vec weight = spread(weights[r * kTile + j]);
      for (int v = 0; v < kVecs; v++) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVecs; v++) store(outputs + r * width + v * kLanes, sums[r][v]);
}

// Turn the scores of the tile into weights, and move `largest` and `total` on.
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
      const Vec weight = choose(score == spread(kHidden), Vec{}, exp_of_negative(score - spread(now)));
      store(scores + i, weight);
      sums += weight;
    }
    const float rescale = exp_of_negative(spread(before - now))[0];
    rows.rescale[r] = rescale;
    rows.total[r] = rows.total[r] * rescale + sum_of(sums);
    rows.largest[r] = now;
  }
}

template <typename T, int kRows>
static void score_all(const Rows& rows, int first, const T* const* keys, int num_keys) {
  if constexpr (kRows > 1) {
    if (rows.count - first < kRows) return score_all<T, kRows - 1>(rows, first, keys, num_keys);
  }
  score_rows<T, kRows>(rows, first, keys, num_keys);
}

template <typename T, int kRows, int kVecs>
static void add_all(const Rows& rows, int first, const T* const* values, int num_values) {
  int offset = 0;
  for (; offset + kVecs * kLanes <= rows.width; offset += kVecs * kLanes)
    add_values<T, kRows, kVecs>(rows, first, values, num_values, offset);
  if (offset + 2 * kLanes <= rows.width) {
    add_values<T, kRows, 2>(rows, first, values, num_values, offset);
    offset += 2 * kLanes;
  }
  if (offset < rows.width)
    add_values<T, kRows, 1>(rows, first, values, num_values, offset);
}

template <typename T, int kRows>
static void add_up(const Rows& rows, int first, const T* const* values, int num_values) {
  if constexpr (kRows > 1) {
    if (rows.count - first < kRows) return add_up<T, kRows - 1>(rows, first, values, num_values);
  }
  add_all<T, kRows, 4>(rows, first, values, num_values);
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
