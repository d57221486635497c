// Attention over a paged pool on CPUs, without torch: plain C symbols, called through ctypes.
//
// A sequence is cut into splits of kSplit positions, and these into tiles, at absolute positions.
// Each query and head gathers split by split, and joins the splits in ascending order. Hence its
// bits depend neither on the batch nor on the threads nor on how its prompt came in chunks.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "tile.h"

namespace rayserve {

constexpr int64_t kSplit = 512;
constexpr int64_t kRowsOfTile = 64;   // Rows (queries times heads of a group) of a task, about.
constexpr int64_t kRowsToUnpack = 9;  // From so many on, a tile is widened to fp32 once for all.

enum Status { kDone = 0, kOtherArguments = 1, kBadTable = 2, kNoMemory = 3 };

// The wrapper has the same fields. Strides count elements. Every pointer is to host memory.
struct Arguments {
  int64_t num_bytes;  // Of this struct.
  int64_t is_bfloat16;
  int64_t num_threads;
  const void* keys;        // Of one layer.
  const void* values;
  const void* queries;     // [num_tokens, num_q_heads, head_dim]
  void* outputs;           // Likewise, contiguous.
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_width]
  const int32_t* windows;       // [num_seqs], or null
  const int32_t* num_sinks;     // Likewise.
  int64_t num_seqs, table_width, num_blocks, block_size;
  int64_t num_q_heads, num_kv_heads, head_dim;
  int64_t key_block, key_head, key_slot;
  int64_t key_part, part_dim;  // Element d of a key: d / part_dim * key_part + d % part_dim.
  int64_t value_block, value_head, value_slot;
  int64_t query_token, query_head;
  double scale;
};

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
};

static int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <typename T>
class Attention {
 public:
  explicit Attention(const Arguments& arguments)
      : a(arguments),
        group(a.num_q_heads / a.num_kv_heads),
        width(rounded_up(a.head_dim, kLanes)),
        num_threads(std::max<int64_t>(1, a.num_threads)) {}

  Status run() {
    list_tasks();
    const int64_t rows = std::max(group, kRowsOfTile);
    // Queries, outputs of a split, outputs of all; a tile of keys and of values; a row of zeros.
    const int64_t floats = rounded_up(
        rows * (3 * width + kTile + 5) + (2 * kTile + 1) * width, 64);
    // Kept from call to call: fresh pages would cost more than a small step.
    static thread_local std::vector<float> kept;
    const size_t num_kept = num_threads * floats + num_parts * group * (width + 2);
    if (kept.size() < num_kept) kept.resize(num_kept);
    float* scratch = kept.data();
    parts = scratch + num_threads * floats;
    std::atomic<bool> is_bad{false};
    const int64_t num_tasks = tasks.size(), num_joined = joined.size();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#if defined(_OPENMP)
      float* own = scratch + omp_get_thread_num() * floats;
#else
      float* own = scratch;
#endif
      const Scratch mine(own, rows, width);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_tasks; i++)
        if (!compute(tasks[i], mine)) is_bad = true;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_joined; i++) join(joined[i], mine);
    }
    return is_bad ? kBadTable : kDone;
  }

 private:
  struct Scratch {
    Scratch(float* memory, int64_t rows, int64_t width)
        : queries(memory),
          outputs(queries + rows * width),
          sums(outputs + rows * width),
          keys(sums + rows * width),
          values(keys + kTile * width),
          zeros(values + kTile * width),
          scores(zeros + width),
          rescale(scores + rows * kTile),
          largest(rescale + rows),
          total(largest + rows),
          sums_largest(total + rows),
          sums_total(sums_largest + rows) {}
    float *queries, *outputs, *sums, *keys, *values, *zeros, *scores, *rescale;
    float *largest, *total, *sums_largest, *sums_total;
  };

  // A decode's splits are tasks of their own, so that one long sequence keeps every thread busy.
  void list_tasks() {
    const int32_t queries_at_once = std::max<int64_t>(1, kRowsOfTile / group);
    for (int32_t s = 0; s < a.num_seqs; s++) {
      const int32_t num_queries = a.query_start[s + 1] - a.query_start[s];
      const int64_t num_splits = (a.seq_lens[s] + kSplit - 1) / kSplit;
      for (int32_t h = 0; h < a.num_kv_heads; h++) {
        if (num_queries == 1 && num_splits > 1) {
          joined.push_back({s, h, 0, 1, 0, num_splits, num_parts});
          for (int64_t i = 0; i < num_splits; i++)
            tasks.push_back({s, h, 0, 1, i, i + 1, num_parts++});
          continue;
        }
        for (int32_t q = 0; q < num_queries; q += queries_at_once)
          tasks.push_back(
              {s, h, q, std::min(queries_at_once, num_queries - q), 0, num_splits, -1});
      }
    }
  }

  Sight sight_of(const Task& task) const {
    const int64_t length = a.seq_lens[task.sequence];
    const int64_t num_new = a.query_start[task.sequence + 1] - a.query_start[task.sequence];
    Sight sight;
    sight.first = length - num_new + task.first_query;
    sight.last = sight.first + task.num_queries - 1;
    sight.window = a.windows ? a.windows[task.sequence] : length + 1;
    sight.num_sinks = a.windows ? a.num_sinks[task.sequence] : 0;
    return sight;
  }

  bool compute(const Task& task, const Scratch& mine) {
    const Sight sight = sight_of(task);
    const int count = task.num_queries * group;
    take_queries(task, mine.queries);
    std::fill(mine.zeros, mine.zeros + width, 0.0f);
    Rows sums = rows_over(mine, count, mine.sums, mine.sums_largest, mine.sums_total);
    clear(sums);
    for (int64_t split = task.first_split; split < task.end_split; split++) {
      Rows rows = rows_over(mine, count, mine.outputs, mine.largest, mine.total);
      if (task.part >= 0) {
        float* part = parts + task.part * group * (width + 2);
        rows = rows_over(mine, count, part, part + group * width, part + group * (width + 1));
      }
      clear(rows);
      if (!add_split(task, sight, rows, split, mine)) return false;
      if (task.part < 0) merge(sums, rows.outputs, rows.largest, rows.total);
    }
    if (task.part < 0) finish(task, sums);
    return true;
  }

  // False where the table names a block that is none. While a tile is computed, the next one is
  // on its way from memory: blocks are too short for the processor to foresee it.
  bool add_split(
      const Task& task, const Sight& sight, const Rows& rows, int64_t split, const Scratch& mine) {
    const int64_t end = std::min((split + 1) * kSplit, sight.last + 1);
    const auto seen_from = [&](int64_t begin) {
      while (begin < end && !sight.sees_some(begin)) begin += kTile;
      return begin;
    };
    Slots slots[2];
    int64_t begin = seen_from(split * kSplit);
    if (begin < end) find_slots(task, sight, begin, slots[0]);
    for (int turn = 0; begin < end; turn = 1 - turn) {
      const int64_t next = seen_from(begin + kTile);
      if (next < end) find_slots(task, sight, next, slots[1 - turn]);
      if (!slots[turn].is_good) return false;
      add_tile(sight, rows, begin, slots[turn], next < end ? &slots[1 - turn] : nullptr, mine);
      begin = next;
    }
    return true;
  }

  void join(const Task& task, const Scratch& mine) {
    Rows sums = rows_over(mine, group, mine.sums, mine.sums_largest, mine.sums_total);
    clear(sums);
    for (int64_t split = task.first_split; split < task.end_split; split++) {
      const float* part = parts + (task.part + split) * group * (width + 2);
      merge(sums, part, part + group * width, part + group * (width + 1));
    }
    finish(task, sums);
  }

  Rows rows_over(
      const Scratch& mine, int64_t count, float* outputs, float* largest, float* total) const {
    Rows rows;
    rows.count = count;
    rows.width = width;
    rows.queries = mine.queries;
    rows.outputs = outputs;
    rows.largest = largest;
    rows.total = total;
    rows.scores = mine.scores;
    rows.rescale = mine.rescale;
    return rows;
  }

  void clear(const Rows& rows) const {
    std::fill(rows.outputs, rows.outputs + rows.count * width, 0.0f);
    std::fill(rows.largest, rows.largest + rows.count, kHidden);
    std::fill(rows.total, rows.total + rows.count, 0.0f);
  }

  // Row q * group + g is query q of the task, head g of the group.
  void take_queries(const Task& task, float* to) const {
    const T* queries = static_cast<const T*>(a.queries);
    const int64_t first = a.query_start[task.sequence] + task.first_query;
    const float scale = static_cast<float>(a.scale);
    for (int64_t q = 0; q < task.num_queries; q++)
      for (int64_t g = 0; g < group; g++, to += width) {
        const T* from = queries + (first + q) * a.query_token
                        + (task.kv_head * group + g) * a.query_head;
        for (int64_t d = 0; d < a.head_dim; d++) to[d] = to_float(from[d]) * scale;
        std::fill(to + a.head_dim, to + width, 0.0f);
      }
  }

  void finish(const Task& task, const Rows& sums) const {
    T* outputs = static_cast<T*>(a.outputs);
    const int64_t first = a.query_start[task.sequence] + task.first_query;
    for (int64_t q = 0; q < task.num_queries; q++)
      for (int64_t g = 0; g < group; g++) {
        const int64_t row = q * group + g;
        const float total = sums.total[row];
        const float* from = sums.outputs + row * width;
        T* to = outputs + ((first + q) * a.num_q_heads + task.kv_head * group + g) * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; d++) narrow(to + d, from[d] / total);
      }
  }

  // Where each position's key and value of a tile lie; null for one that no query of the task sees.
  struct Slots {
    bool is_good;  // Whether the table names a block for each.
    int num;       // Positions up to the task's last.
    const T* keys[kTile];
    const T* values[kTile];
  };

  void add_tile(
      const Sight& sight, const Rows& rows, int64_t begin, Slots& slots, const Slots* next,
      const Scratch& mine) const {
    const int num = slots.num;
    const T** keys = slots.keys;
    const T** values = slots.values;
    const bool is_direct = a.head_dim == width && a.part_dim == a.head_dim
                           && (sizeof(T) == sizeof(float) || rows.count < kRowsToUnpack);
    if (is_direct) {
      const T* zeros = reinterpret_cast<const T*>(mine.zeros);
      for (int i = 0; i < kTile; i++)
        if (i >= num || keys[i] == nullptr) keys[i] = values[i] = zeros;
      attend(sight, rows, begin, keys, values, num, next);
      return;
    }
    const float* wide_keys[kTile];
    const float* wide_values[kTile];
    for (int i = 0; i < kTile; i++) {
      const bool is_seen = i < num && keys[i] != nullptr;
      wide_keys[i] = is_seen ? widen(mine.keys + i * width, keys[i], a.part_dim, a.key_part)
                             : mine.zeros;
      wide_values[i] = is_seen ? widen(mine.values + i * width, values[i], a.head_dim, 0)
                               : mine.zeros;
    }
    attend(sight, rows, begin, wide_keys, wide_values, num, nullptr);
  }

  void find_slots(const Task& task, const Sight& sight, int64_t begin, Slots& slots) const {
    slots.is_good = false;
    slots.num = std::min<int64_t>(kTile, sight.last + 1 - begin);
    const int32_t* table = a.block_tables + task.sequence * a.table_width;
    const T* all_keys = static_cast<const T*>(a.keys) + task.kv_head * a.key_head;
    const T* all_values = static_cast<const T*>(a.values) + task.kv_head * a.value_head;
    int64_t place = begin / a.block_size, offset = begin % a.block_size;
    for (int i = 0; i < slots.num; i++, offset++) {
      if (offset == a.block_size) place++, offset = 0;
      slots.keys[i] = slots.values[i] = nullptr;
      if (!sight.sees(begin + i)) continue;
      if (place >= a.table_width) return;
      const int64_t block_id = table[place];
      if (block_id < 0 || block_id >= a.num_blocks) return;
      slots.keys[i] = all_keys + block_id * a.key_block + offset * a.key_slot;
      slots.values[i] = all_values + block_id * a.value_block + offset * a.value_slot;
    }
    slots.is_good = true;
  }

  const float* widen(float* to, const T* from, int64_t part_dim, int64_t part_stride) const {
    for (int64_t begin = 0; begin < a.head_dim; begin += part_dim, from += part_stride) {
      int64_t d = 0;
      for (; d + kLanes <= part_dim; d += kLanes) store(to + begin + d, load(from + d));
      for (; d < part_dim; d++) to[begin + d] = to_float(from[d]);
    }
    std::fill(to + a.head_dim, to + width, 0.0f);
    return to;
  }

  template <typename S>
  void attend(
      const Sight& sight, const Rows& rows, int64_t begin, const S* const* keys,
      const S* const* values, int num, const Slots* next) const {
    if (next != nullptr && next->is_good) fetch(next->keys, next->num);
    const int num_scored = rounded_up(num, 4);
    for (int r = 0; r < rows.count; r += kRowsAtOnce)
      score_all<S, kRowsAtOnce>(rows, r, keys, num_scored);
    for (int r = 0; r < rows.count; r++)
      hide(sight, rows.scores + r * kTile, sight.first + r / group, begin);
    weigh(rows);
    if (next != nullptr && next->is_good) fetch(next->values, next->num);
    for (int r = 0; r < rows.count; r += kRowsAtOnce)
      add_up<S, kRowsAtOnce>(rows, r, values, num);
  }

  void fetch(const T* const* vectors, int num) const {
    for (int i = 0; i < num; i++) {
      if (vectors[i] == nullptr) continue;
      const char* vector = reinterpret_cast<const char*>(vectors[i]);
      for (size_t at = 0; at < a.head_dim * sizeof(T); at += 64) __builtin_prefetch(vector + at, 0, 2);
    }
  }

  // Mark what the query at position `query` does not see of the tile.
  static void hide(const Sight& sight, float* scores, int64_t query, int64_t begin) {
    const auto within = [begin](int64_t position) {
      return std::clamp<int64_t>(position - begin, 0, kTile);
    };
    const int64_t first_seen = within(query - sight.window + 1);
    std::fill(scores + within(query + 1), scores + kTile, kHidden);
    if (const int64_t end = within(sight.num_sinks); end < first_seen)
      std::fill(scores + end, scores + first_seen, kHidden);
  }

  const Arguments& a;
  const int64_t group;
  const int64_t width;
  const int64_t num_threads;
  std::vector<Task> tasks;
  std::vector<Task> joined;  // Those whose splits are tasks of their own.
  float* parts = nullptr;
  int64_t num_parts = 0;
};

}  // namespace rayserve

extern "C" int rayserve_attend(const rayserve::Arguments* arguments) {
  using namespace rayserve;
  if (arguments->num_bytes != static_cast<int64_t>(sizeof(Arguments))) return kOtherArguments;
  try {
    if (arguments->is_bfloat16) return Attention<BFloat16>(*arguments).run();
    return Attention<float>(*arguments).run();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}
