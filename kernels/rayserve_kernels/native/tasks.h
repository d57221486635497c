// The work of a call in pieces that threads can take, and what each piece sees.
#pragma once

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "tile.h"

namespace rayserve {

constexpr int64_t kSplit = 512;
constexpr int64_t kRowsOfTask = 64;     // Rows (queries times heads of a group) of a task, about.
constexpr int64_t kTasksOfThread = 8;   // So many keep threads busy to the end.

// What one task computes: queries of a sequence, with one KV head, over some of its splits.
struct Task {
  int32_t sequence, kv_head;
  int32_t first_query, num_queries;  // Within the sequence's queries.
  int64_t first_split, end_split;
  int64_t part;  // Where the result waits to be joined; -1 where the task computes all splits.
};

// The positions that a task's queries see together.
struct Sight {
  int64_t first, last;   // Positions of its first and last query.
  int64_t window;        // Past last + 1 where there is none.
  int64_t num_sinks;

  bool sees(int64_t position) const {
    return position <= last && (position < num_sinks || position > first - window);
  }
  bool sees_some(int64_t begin) const {
    return begin <= last && (begin < num_sinks || begin + kTile - 1 > first - window);
  }

  // Begin of the first tile from `begin` on that holds a seen position; past `last` if none does.
  int64_t seen_from(int64_t begin) const {
    while (begin <= last && !sees_some(begin)) begin += kTile;
    return begin;
  }
};

static inline Sight sight_of(const Arguments& a, const Task& task) {
  const int64_t length = a.seq_lens[task.sequence];
  const int64_t num_new = a.query_start[task.sequence + 1] - a.query_start[task.sequence];
  Sight sight;
  sight.first = length - num_new + task.first_query;
  sight.last = sight.first + task.num_queries - 1;
  sight.window = a.windows ? a.windows[task.sequence] : length + 1;
  sight.num_sinks = a.windows ? a.num_sinks[task.sequence] : 0;
  return sight;
}

struct TaskList {
  std::vector<Task> tasks;
  std::vector<Task> joined;  // Those whose splits are tasks of their own.
  int64_t num_parts = 0;

  explicit TaskList(const Arguments& a, int64_t num_threads) {
    const int64_t group = a.num_q_heads / a.num_kv_heads;
    const int32_t queries_at_once = std::max<int64_t>(1, kRowsOfTask / group);
    // With few sequences, a decode's splits are tasks of their own, so that long ones keep every
    // thread busy. The bits are the same.
    const bool is_split = a.num_seqs * a.num_kv_heads < kTasksOfThread * num_threads;
    for (int32_t s = 0; s < a.num_seqs; s++) {
      const int32_t num_queries = a.query_start[s + 1] - a.query_start[s];
      const int64_t num_splits = (a.seq_lens[s] + kSplit - 1) / kSplit;
      for (int32_t h = 0; h < a.num_kv_heads; h++) {
        if (is_split && num_queries == 1 && num_splits > 1) {
          joined.push_back({s, h, 0, 1, 0, num_splits, num_parts});
          for (int64_t i = 0; i < num_splits; i++)
            tasks.push_back({s, h, 0, 1, i, i + 1, num_parts++});
          continue;
        }
        for (int32_t q = 0; q < num_queries; q += queries_at_once)
          tasks.push_back({s, h, q, std::min(queries_at_once, num_queries - q), 0, num_splits, -1});
      }
    }
  }
};

}  // namespace rayserve
