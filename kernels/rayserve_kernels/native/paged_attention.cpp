// Attention over a paged pool on CPUs, without torch: plain C symbols, called through ctypes.
//
// A sequence is cut into splits of kSplit positions, and these into tiles, at absolute positions.
// Each query and head gathers split by split, and joins the splits in ascending order. Hence its
// bits depend neither on the batch nor on the threads nor on how its prompt came in chunks.
#include <atomic>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "bfloat16_tile.h"
#include "tasks.h"

namespace rayserve {

constexpr int64_t kRowsToUnpack = 9;  // From so many on, a tile is widened to fp32 once for all.

static int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// T: how keys and values lie in the pool. By: how products are made.
template <typename T, typename By>
class Attention {
 public:
  explicit Attention(const Arguments& arguments)
      : a(arguments),
        group(a.num_q_heads / a.num_kv_heads),
        width(rounded_up(a.head_dim, By::kStep)),
        num_threads(std::max<int64_t>(1, a.num_threads)),
        list(arguments, num_threads) {}

  Status run() {
    const int64_t num_rows = std::max(group, kRowsOfTask);
    const int64_t floats = rounded_up(Scratch::num_floats(num_rows, width), 64);
    // Kept from call to call: fresh pages would cost more than a small step.
    static thread_local std::vector<float> kept;
    const size_t num_kept = num_threads * floats + list.num_parts * group * (width + 2);
    if (kept.size() < num_kept) kept.resize(num_kept);
    float* scratch = kept.data();
    parts = scratch + num_threads * floats;
    const int64_t num_joined = list.joined.size();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#if defined(_OPENMP)
      float* own = scratch + omp_get_thread_num() * floats;
#else
      float* own = scratch;
#endif
      const Scratch mine(own, num_rows, width);
      compute_tasks(mine);
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_joined; i++) join(list.joined[i], mine);
    }
    return is_bad ? kBadTable : kDone;
  }

 private:
  typedef typename By::Element Element;

  // Of one thread.
  struct Scratch {
    static int64_t num_floats(int64_t num_rows, int64_t width) {
      return num_rows * (3 * width + kTile + 5) + (2 * kTile + 1) * width;
    }

    Scratch(float* memory, int64_t num_rows, int64_t width)
        : queries(reinterpret_cast<Element*>(memory)),
          outputs(memory + num_rows * width),
          sums(outputs + num_rows * width),
          keys(reinterpret_cast<Element*>(sums + num_rows * width)),
          values(reinterpret_cast<Element*>(sums + (num_rows + kTile) * width)),
          zeros(sums + (num_rows + 2 * kTile) * width),
          scores(zeros + width),
          rescale(scores + num_rows * kTile),
          largest(rescale + num_rows),
          total(largest + num_rows),
          sums_largest(total + num_rows),
          sums_total(sums_largest + num_rows) {
      std::fill(zeros, zeros + width, 0.0f);
    }

    Element* queries;
    float *outputs, *sums;    // Of the split in hand, and of those before.
    Element *keys, *values;   // A tile of each.
    float *zeros, *scores, *rescale, *largest, *total, *sums_largest, *sums_total;
  };

  // A tile of a task, and where its keys and values lie.
  struct Tile {
    int64_t task;   // Past the last one where there is no more work.
    Sight sight;
    int64_t begin;  // Position.
    int num;        // Positions up to the task's last query.
    Place keys[kTile], values[kTile];
    const float *key_scales[kTile], *value_scales[kTile];

    int64_t split() const { return begin / kSplit; }
  };

  // The scales of a tile; 1 where nothing is seen.
  struct Scales {
    float of[kTile];

    Scales(const float* const* scales, int num) {
      std::fill(of, of + kTile, 1.0f);
      for (int i = 0; i < num; i++)
        if (scales[i] != nullptr) of[i] = *scales[i];
    }

    void multiply(float* numbers) const {
      for (int i = 0; i < kTile; i += kLanes) store(numbers + i, load(numbers + i) * load(of + i));
    }
  };

  // Tile after tile, over splits and tasks: the next one is always known while one is computed.
  void compute_tasks(const Scratch& mine) {
    Tile tiles[2];
    if (!claim(tiles[0], mine)) return;
    const int64_t num_tasks = list.tasks.size();
    bool starts_task = true, starts_split = true;
    for (int turn = 0; tiles[turn].task < num_tasks; turn = 1 - turn) {
      const Tile& tile = tiles[turn];
      Tile& next = tiles[1 - turn];
      if (!advance(tile, next, mine)) return;
      const bool ends_task = next.task != tile.task;
      const bool ends_split = ends_task || next.split() != tile.split();
      const Task& task = list.tasks[tile.task];
      const bool is_part = task.part >= 0;
      const Rows sums = sums_of(task, mine);
      const Rows rows = is_part ? part_of(task, mine)
                                : rows_over(task, mine, mine.outputs, mine.largest, mine.total);
      if (starts_task) take_queries(task, mine.queries);
      if (starts_task && !is_part) clear(sums);
      if (starts_split) clear(rows);
      add_tile(tile, task, rows, next, mine);
      if (ends_split && !is_part) merge(sums, rows.outputs, rows.largest, rows.total);
      if (ends_task && !is_part) finish(task, sums);
      starts_task = ends_task;
      starts_split = ends_split;
    }
  }

  // Find the first tile of a task that no thread has. False where a table names no block.
  bool claim(Tile& tile, const Scratch& mine) {
    const int64_t num_tasks = list.tasks.size();
    tile.num = 0;
    while ((tile.task = num_claimed++) < num_tasks) {
      const Task& task = list.tasks[tile.task];
      tile.sight = sight_of(a, task);
      tile.begin = tile.sight.seen_from(task.first_split * kSplit);
      if (is_inside(task, tile)) return find_slots(tile);
      // A split of which nothing is seen.
      clear(part_of(task, mine));
    }
    return true;
  }

  // Find the tile after `tile`.
  bool advance(const Tile& tile, Tile& next, const Scratch& mine) {
    next.task = tile.task;
    next.sight = tile.sight;
    next.begin = tile.sight.seen_from(tile.begin + kTile);
    if (is_inside(list.tasks[tile.task], next)) return find_slots(next);
    return claim(next, mine);
  }

  static bool is_inside(const Task& task, const Tile& tile) {
    return tile.begin <= tile.sight.last && tile.begin < task.end_split * kSplit;
  }

  void join(const Task& task, const Scratch& mine) {
    const Rows sums = sums_of(task, mine);
    clear(sums);
    for (int64_t split = task.first_split; split < task.end_split; split++) {
      const float* part = parts + (task.part + split) * group * (width + 2);
      merge(sums, part, part + group * width, part + group * (width + 1));
    }
    finish(task, sums);
  }

  Rows sums_of(const Task& task, const Scratch& mine) const {
    return rows_over(task, mine, mine.sums, mine.sums_largest, mine.sums_total);
  }

  Rows part_of(const Task& task, const Scratch& mine) const {
    float* part = parts + task.part * group * (width + 2);
    return rows_over(task, mine, part, part + group * width, part + group * (width + 1));
  }

  Rows rows_over(
      const Task& task, const Scratch& mine, float* outputs, float* largest, float* total) const {
    Rows rows;
    rows.count = task.num_queries * group;
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
  void take_queries(const Task& task, Element* to) const {
    switch (a.query_format) {
      case kFloat32: return take_queries(task, to, static_cast<const float*>(a.queries));
      case kBFloat16: return take_queries(task, to, static_cast<const BFloat16*>(a.queries));
      case kFloat16: return take_queries(task, to, static_cast<const Float16*>(a.queries));
    }
  }

  template <typename Q>
  void take_queries(const Task& task, Element* to, const Q* queries) const {
    const int64_t first = a.query_start[task.sequence] + task.first_query;
    for (int64_t q = 0; q < task.num_queries; q++)
      for (int64_t g = 0; g < group; g++, to += width)
        take(to, queries + (first + q) * a.query_token
                      + (task.kv_head * group + g) * a.query_head, a.head_dim, 0);
  }

  void finish(const Task& task, const Rows& sums) const {
    switch (a.query_format) {
      case kFloat32: return finish(task, sums, static_cast<float*>(a.outputs));
      case kBFloat16: return finish(task, sums, static_cast<BFloat16*>(a.outputs));
      case kFloat16: return finish(task, sums, static_cast<Float16*>(a.outputs));
    }
  }

  template <typename Q>
  void finish(const Task& task, const Rows& sums, Q* outputs) const {
    const int64_t first = a.query_start[task.sequence] + task.first_query;
    for (int64_t row = 0; row < sums.count; row++) {
      const int64_t head = task.kv_head * group + row % group;
      Q* to = outputs + ((first + row / group) * a.num_q_heads + head) * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; d += kLanes) {
        float some[kLanes];
        By::take_outputs(some, sums.outputs + row * width, d);
        const Vec outputs_of_some = load(some) / spread(sums.total[row]);
        Q narrow[kLanes];
        store_as(narrow, outputs_of_some);
        std::copy_n(narrow, std::min<int64_t>(kLanes, a.head_dim - d), to + d);
      }
    }
  }

  void add_tile(
      const Tile& tile, const Task& task, const Rows& rows, const Tile& next, const Scratch& mine) {
    const bool is_direct = a.head_dim == width && a.part_dim == a.head_dim
                           && (std::is_same_v<T, Element> || rows.count < kRowsToUnpack);
    const Place zeros = reinterpret_cast<Place>(mine.zeros);
    Place keys[kTile], values[kTile], next_keys[kTile], next_values[kTile];
    for (int i = 0; i < kTile; i++) {
      const bool is_seen = i < tile.num && tile.keys[i] != nullptr;
      const bool is_next = i < next.num && next.keys[i] != nullptr;
      keys[i] = is_seen ? tile.keys[i] : zeros;
      values[i] = is_seen ? tile.values[i] : zeros;
      next_keys[i] = is_next ? next.keys[i] : zeros;
      next_values[i] = is_next ? next.values[i] : zeros;
    }
    if (is_direct) return attend<T>(tile, task, rows, keys, values, next_keys, next_values);
    for (int i = 0; i < tile.num; i++) {
      if (tile.keys[i] == nullptr) continue;
      keys[i] = taken(mine.keys, i, tile.keys[i], a.part_dim, a.key_part);
      values[i] = taken(mine.values, i, tile.values[i], a.head_dim, 0);
    }
    attend<Element>(tile, task, rows, keys, values, nullptr, nullptr);
  }

  // S: in what elements `keys` and `values` lie.
  template <typename S>
  void attend(
      const Tile& tile, const Task& task, const Rows& rows, const Place* keys, const Place* values,
      const Place* next_keys, const Place* next_values) const {
    for (int r = 0; r < rows.count; r += kRowsAtOnce)
      score_all<By, S, kRowsAtOnce>(
          rows, r, keys, rounded_up(tile.num, 4), r == 0 ? next_keys : nullptr);
    const Scales key_scales(tile.key_scales, a.key_scales ? tile.num : 0);
    for (int r = 0; r < rows.count; r++)
      shape_scores(tile, task, key_scales, r, rows.scores + r * kTile);
    weigh<By>(rows);
    if (a.value_scales) {
      const Scales scales(tile.value_scales, tile.num);
      for (int r = 0; r < rows.count; r++) scales.multiply(rows.scores + r * kTile);
    }
    for (int r = 0; r < rows.count; r += kRowsAtOnce)
      add_up<By, S, kRowsAtOnce>(rows, r, values, tile.num, r == 0 ? next_values : nullptr);
  }

  // From products to scores: scales, the soft cap, ALiBi, and what the row's query does not see.
  void shape_scores(
      const Tile& tile, const Task& task, const Scales& key_scales, int row, float* scores) const {
    const int64_t query = tile.sight.first + row / group;
    const float scale = a.scale;
    for (int i = 0; i < kTile; i += kLanes) store(scores + i, load(scores + i) * spread(scale));
    if (a.key_scales) key_scales.multiply(scores);
    if (a.soft_cap > 0) {
      const float cap = a.soft_cap, over_cap = 1 / a.soft_cap;
      for (int i = 0; i < kTile; i += kLanes)
        store(scores + i, tanh_of(load(scores + i) * spread(over_cap)) * spread(cap));
    }
    if (a.alibi_slopes) {
      const float slope = a.alibi_slopes[task.kv_head * group + row % group];
      for (int i = 0; i < tile.num; i++)
        scores[i] += slope * static_cast<float>(tile.begin + i - query);
    }
    hide(tile.sight, scores, query, tile.begin);
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

  // False, and every thread stops, where the table names a block that is none.
  bool find_slots(Tile& tile) {
    if (places_of(tile)) return true;
    is_bad = true;
    num_claimed = list.tasks.size();
    return false;
  }

  bool places_of(Tile& tile) const {
    const Task& task = list.tasks[tile.task];
    tile.num = std::min<int64_t>(kTile, tile.sight.last + 1 - tile.begin);
    const int32_t* table = a.block_tables + task.sequence * a.table_width;
    const T* keys = static_cast<const T*>(a.keys) + task.kv_head * a.key_head;
    const T* values = static_cast<const T*>(a.values) + task.kv_head * a.value_head;
    int64_t place = tile.begin / a.block_size, offset = tile.begin % a.block_size;
    for (int i = 0; i < tile.num; i++, offset++) {
      if (offset == a.block_size) place++, offset = 0;
      tile.keys[i] = tile.values[i] = nullptr;
      tile.key_scales[i] = tile.value_scales[i] = nullptr;
      if (!tile.sight.sees(tile.begin + i)) continue;
      if (place >= a.table_width) return false;
      const int64_t block_id = table[place];
      if (block_id < 0 || block_id >= a.num_blocks) return false;
      tile.keys[i] = reinterpret_cast<Place>(keys + block_id * a.key_block + offset * a.key_slot);
      tile.values[i] =
          reinterpret_cast<Place>(values + block_id * a.value_block + offset * a.value_slot);
      if (!a.key_scales) continue;
      tile.key_scales[i] = a.key_scales + block_id * a.key_scale_block
                           + task.kv_head * a.key_scale_head + offset * a.key_scale_slot;
      tile.value_scales[i] = a.value_scales + block_id * a.value_scale_block
                             + task.kv_head * a.value_scale_head + offset * a.value_scale_slot;
      __builtin_prefetch(tile.key_scales[i], 0, 2);
      __builtin_prefetch(tile.value_scales[i], 0, 2);
    }
    return true;
  }

  // A vector of the pool, widened to index i of a tile.
  Place taken(Element* tile, int i, Place from, int64_t part_dim, int64_t part_stride) const {
    take(tile + i * width, reinterpret_cast<const T*>(from), part_dim, part_stride);
    return reinterpret_cast<Place>(tile + i * width);
  }

  // Write a vector in the elements of products, with zeros beyond head_dim.
  template <typename S>
  void take(Element* to, const S* from, int64_t part_dim, int64_t part_stride) const {
    std::fill(to + a.head_dim, to + width, Element{});
    for (int64_t begin = 0; begin < a.head_dim; begin += part_dim, from += part_stride) {
      int64_t d = 0;
      for (; d + kLanes <= part_dim; d += kLanes) store_as(to + begin + d, load(from + d));
      for (; d < part_dim; d++) to[begin + d] = as<Element>(to_float(from[d]));
    }
  }

  const Arguments& a;
  const int64_t group;
  const int64_t width;
  const int64_t num_threads;
  const TaskList list;
  float* parts = nullptr;
  std::atomic<int64_t> num_claimed{0};
  std::atomic<bool> is_bad{false};
};

}  // namespace rayserve

template <typename T>
static int attend_by(const rayserve::Arguments& a) {
  using namespace rayserve;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (a.query_format == kBFloat16) return Attention<T, ByPairs>(a).run();
  }
#endif
  return Attention<T, ByFloats>(a).run();
}

extern "C" int rayserve_attend(const rayserve::Arguments* arguments) {
  using namespace rayserve;
  const Arguments& a = *arguments;
  if (a.num_bytes != static_cast<int64_t>(sizeof(Arguments))) return kOtherArguments;
  try {
    switch (a.kv_format) {
      case kFloat32: return attend_by<float>(a);
      case kBFloat16: return attend_by<BFloat16>(a);
      case kFloat16: return attend_by<Float16>(a);
      case kInt8: return attend_by<Int8>(a);
      case kFloat8E4M3: return attend_by<Float8E4M3>(a);
    }
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kOtherArguments;
}
