// What the wrapper passes, field by field.
#pragma once

#include <cstdint>

namespace rayserve {

enum Status { kDone = 0, kOtherArguments = 1, kBadTable = 2, kNoMemory = 3 };

// Of elements. The last two are of pools with scales.
enum Format { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kFloat8E4M3 = 4 };

// Strides count elements. Every pointer is to host memory.
struct Arguments {
  int64_t num_bytes;  // Of this struct.
  int64_t query_format, kv_format;
  int64_t num_threads;
  const void* keys;        // Of one layer.
  const void* values;
  const float* key_scales;    // Of each slot and head, or null; likewise for values.
  const float* value_scales;
  const void* queries;     // [num_tokens, num_q_heads, head_dim]
  void* outputs;           // Likewise, contiguous.
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_width]
  const int32_t* windows;       // [num_seqs], or null
  const int32_t* num_sinks;     // Likewise.
  const float* alibi_slopes;    // [num_q_heads], or null
  int64_t num_seqs, table_width, num_blocks, block_size;
  int64_t num_q_heads, num_kv_heads, head_dim;
  int64_t key_block, key_head, key_slot;
  int64_t key_part, part_dim;  // Element d of a key: d / part_dim * key_part + d % part_dim.
  int64_t value_block, value_head, value_slot;
  int64_t key_scale_block, key_scale_head, key_scale_slot;
  int64_t value_scale_block, value_scale_head, value_scale_slot;
  int64_t query_token, query_head;
  double scale;
  double soft_cap;  // 0 for none.
};

}  // namespace rayserve
