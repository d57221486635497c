// Decodes and chunks over a small pool with poisoned slots, for the sanitizers: every buffer is as
// long as it must be and no longer.
#include <cmath>
#include <cstdio>
#include <limits>

#include "paged_attention.cpp"

namespace {

// Numbers of a format, exact where they are small integers.
template <typename T>
T number(float value) { return rayserve::as<T>(value); }
template <>
rayserve::Int8 number(float value) { return {static_cast<int8_t>(value == value ? value : 0)}; }
template <>
rayserve::Float8E4M3 number(float value) {
  for (int bits = 0; bits < 256; bits++) {
    const rayserve::Float8E4M3 candidate = {static_cast<uint8_t>(bits)};
    if (rayserve::to_float(candidate) == value) return candidate;
  }
  return {0x7f};
}

// T: of keys and values. Q: of queries and outputs.
template <typename T, typename Q>
int run(rayserve::Format kv_format, rayserve::Format query_format, int64_t head_dim, int64_t block_size, int64_t window, int64_t num_threads) {
  const int64_t num_q_heads = 6, num_kv_heads = 2, num_seqs = 4;
  const int32_t query_start[] = {0, 1, 2, 42, 42};
  const int32_t seq_lens[] = {1, 700, 70, 5};
  const int32_t windows[] = {1, static_cast<int32_t>(window), 9, 1};
  const int32_t num_sinks[] = {0, 3, 2, 0};
  const int64_t table_width = (700 + block_size - 1) / block_size;
  const int64_t num_blocks = num_seqs * table_width;
  const int64_t block = num_kv_heads * block_size * head_dim;
  const float poison = std::numeric_limits<float>::quiet_NaN();
  std::vector<T> keys(num_blocks * block, number<T>(poison)), values(keys);
  const bool has_scales = kv_format == rayserve::kInt8 || kv_format == rayserve::kFloat8E4M3;
  std::vector<float> key_scales(num_blocks * num_kv_heads * block_size, poison);
  std::vector<float> value_scales(key_scales);
  const std::vector<float> slopes(num_q_heads, -0.5f);
  std::vector<Q> queries(42 * num_q_heads * head_dim), outputs(queries.size());
  std::vector<int32_t> tables(num_seqs * table_width, std::numeric_limits<int32_t>::max());
  for (size_t i = 0; i < queries.size(); i++)
    queries[i] = number<Q>(static_cast<float>(i % 13) - 6);
  const T two = number<T>(has_scales ? 4.0f : 2.0f);
  std::vector<T> small;
  for (int i = -3; i <= 3; i++) small.push_back(number<T>(i));
  for (int64_t s = 0; s < num_seqs; s++)
    for (int64_t t = 0; t < seq_lens[s]; t++) {
      const int64_t block_id = num_blocks - 1 - (s * table_width + t / block_size);
      tables[s * table_width + t / block_size] = static_cast<int32_t>(block_id);
      for (int64_t h = 0; h < num_kv_heads; h++) {
        const int64_t slot = (block_id * num_kv_heads + h) * block_size + t % block_size;
        key_scales[slot] = 1.0f, value_scales[slot] = 0.5f;
        for (int64_t d = 0; d < head_dim; d++) {
          const int64_t at = block_id * block + (h * block_size + t % block_size) * head_dim + d;
          keys[at] = small[(t + d) % 7];
          values[at] = two;
        }
      }
    }
  rayserve::Arguments a = {};
  a.num_bytes = sizeof(a);
  a.kv_format = kv_format, a.query_format = query_format;
  a.num_threads = num_threads;
  a.keys = keys.data(), a.values = values.data();
  a.queries = queries.data(), a.outputs = outputs.data();
  a.query_start = query_start, a.seq_lens = seq_lens, a.block_tables = tables.data();
  if (window > 0) a.windows = windows, a.num_sinks = num_sinks;
  a.num_seqs = num_seqs, a.table_width = table_width, a.num_blocks = num_blocks;
  a.block_size = block_size;
  a.num_q_heads = num_q_heads, a.num_kv_heads = num_kv_heads, a.head_dim = head_dim;
  a.key_block = a.value_block = block, a.key_head = a.value_head = block_size * head_dim;
  a.key_slot = a.value_slot = head_dim, a.key_part = 0, a.part_dim = head_dim;
  if (has_scales) a.key_scales = key_scales.data(), a.value_scales = value_scales.data();
  a.key_scale_block = a.value_scale_block = num_kv_heads * block_size;
  a.key_scale_head = a.value_scale_head = block_size;
  a.key_scale_slot = a.value_scale_slot = 1;
  if (window > 0) a.alibi_slopes = slopes.data(), a.soft_cap = 3;
  a.query_token = num_q_heads * head_dim, a.query_head = head_dim;
  a.scale = 0.1;
  if (rayserve_attend(&a) != rayserve::kDone) return 1;
  // Whatever the weights, a mean of twos is two.
  for (const Q& output : outputs)
    if (!(std::fabs(rayserve::to_float(output) - 2.0f) < 1e-5f)) return 2;
  // A block that is none is an error, unless the window hides it.
  tables[table_width + 300 / block_size] = static_cast<int32_t>(num_blocks);
  return rayserve_attend(&a) == (window == 0 ? rayserve::kBadTable : rayserve::kDone) ? 0 : 3;
}

}  // namespace

int main() {
  using namespace rayserve;
  for (const int64_t head_dim : {5, 64, 80})
    for (const int64_t block_size : {1, 7, 16})
      for (const int64_t window : {0, 90})
        for (const int64_t num_threads : {1, 3}) {
          const auto fails = [&](auto kv, auto query, auto kv_format, auto query_format) {
            return run<decltype(kv), decltype(query)>(
                kv_format, query_format, head_dim, block_size, window, num_threads);
          };
          int failed = fails(float(), float(), kFloat32, kFloat32);
          if (!failed) failed = fails(BFloat16(), BFloat16(), kBFloat16, kBFloat16);
          if (!failed) failed = fails(BFloat16(), float(), kBFloat16, kFloat32);
          if (!failed) failed = fails(Float16(), Float16(), kFloat16, kFloat16);
          if (!failed) failed = fails(Int8(), float(), kInt8, kFloat32);
          if (!failed) failed = fails(Float8E4M3(), BFloat16(), kFloat8E4M3, kBFloat16);
          if (!failed) continue;
          std::printf("head_dim %d, block_size %d, window %d: failure %d\n", (int)head_dim,
                      (int)block_size, (int)window, failed);
          return 1;
        }
  std::puts("all right");
}
