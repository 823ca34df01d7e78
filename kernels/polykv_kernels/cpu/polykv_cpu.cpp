// Attention on packed keys and values, their encoding, and linear layers, for the CPU.
//
// One file, a plain C interface at its end, no dependency but the C++17 standard library and POSIX threads. Notation
// and layouts are those of layouts.py: Hkv KV heads, T tokens, D head dim (a multiple of 16, at most 256), tiles of 64
// tokens.
//
// Parts, in order:
//   1. Common: types, half precision, memory, the thread pool.
//   2. The kernels. This file includes itself once for each instruction set, under that set's target options and in a
//      namespace of its own, and each pass compiles part 2 alone. So a single compiler call without -m options makes a
//      library with every path in it, and the choice is made at run time.
//   3. The choice of instruction set, and the C interface.
//
// Method: all rows that read one KV head (requests x query heads of the group) are stacked and walk over the tiles together.
// A tile is dequantised to floats (once, if the rows are many), and a register-blocked multiply serves a panel of 6 or 12
// rows at a time: scores = q K, online softmax (Milakov & Gimelshein 2018), acc += p V. Channel-major keys make the vector
// lanes tokens, so packed keys need neither a transpose nor a horizontal sum. Token ranges are independent units of work, joined by (maximum, sum) as in split-KV attention
// (FlashDecoding, FlashInfer); the Hadamard rotation of the values is undone after that, once a row.

#if !defined(POLYKV_KERNEL_PASS)

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// ------------------------------------------------------------------------------------------------- 1. common

namespace {

constexpr int kTile = 64;         // tokens
constexpr int kMaxPanel = 12;     // rows that share one pass over a tile, at most
constexpr int kMaxWidth = 16;     // floats in a vector, at most
constexpr int kBlockRows = 96;    // rows of one unit: dequantising a tile costs 2 % of their arithmetic
constexpr int kMaxHeadDim = 256;
constexpr int kSumChannels = 64;  // products added up in one chain: a longer one rounds more
constexpr int kMinTilesPerUnit = 8;   // joining the partial results of shorter units would be felt
constexpr int kTargetUnits = 64;      // enough to keep many threads busy to the end
constexpr int kMaxCausalUnits = 32;   // 16,384 tokens
constexpr int kMaxInputs = 1024;  // of a linear layer, whose products are added up in one go
constexpr int kScaleInputs = 64;  // inputs that share a scale of int8 weights
constexpr int64_t kFewNumbers = 128 << 10;  // of x, up to which all of it stays in the cache while the weights pass
constexpr int64_t kFetchRows = 10;  // with which the arithmetic of a linear layer takes as long as the fetching of its weights
constexpr int64_t kSerialLinear = 3 << 19;  // kSerialWork for linear layers, which come one after another: workers are awake
constexpr int64_t kUnitsPerThread = 6;
constexpr int64_t kMinUnitOutputs = 8;
constexpr int64_t kMaxUnitOutputs = 32;  // whose weights stay in the cache
constexpr int64_t kMaxUnitRows = 256;
constexpr int64_t kSerialWork = 6 << 20;  // multiply-adds (0.1 ms or so) below which waking threads costs more than it saves
constexpr float kInf = __builtin_huge_valf();
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt8 = 3 };
enum Status : int32_t { kOk = 0, kNoMemory = 1, kBadArgument = 2, kOverflow = 3 };

}  // namespace

extern "C" {

// Dense keys and values of all KV heads; the last axis is contiguous. Strides count elements.
struct PolykvDense {
  const void* keys;    // [Hkv, T, D]
  const void* values;  // [Hkv, T, D]
  int64_t key_head_stride;
  int64_t key_token_stride;
  int64_t value_head_stride;
  int64_t value_token_stride;
  int64_t num_tokens;
  int32_t dtype;  // Dtype
};

// Int8Keys and LloydMax3Values of layouts.py. Head strides count elements; inner axes are contiguous.
struct PolykvPacked {
  const int8_t* key_codes;       // [Hkv, n_tiles, D, 64]
  const uint16_t* key_scales;    // float16 [Hkv, n_tiles, D], or null: key_scale serves all
  const uint8_t* value_codes;    // [Hkv, T, 3 D / 8]
  const uint16_t* value_scales;  // float16 [Hkv, T]
  const float* levels;           // [8]
  const float* signs;            // [D], or null
  int64_t key_head_stride;
  int64_t key_scale_head_stride;
  int64_t value_head_stride;
  int64_t value_scale_head_stride;
  int64_t num_tokens;
  float key_scale;
  int32_t hadamard_block;
};

}  // extern "C"

namespace {

// ---- half precision, for single numbers

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x0400u) {  // zero and denormals: 2^-24 a step
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-08f;
    return bits_to_float(sign | float_to_bits(magnitude));
  }
  return bits_to_float(sign | ((rest << 13) + (112u << 23)));
}

// Round to nearest, ties to even; too large gives infinity.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00u;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (rest < 0x38800000u) {                        // below 2^-14: let the adder round at 2^-24
    const float shifted = bits_to_float(rest) + 0.5f;
    return sign | static_cast<uint16_t>(float_to_bits(shifted) - 0x3f000000u);
  }
  const uint32_t odd = rest >> 13 & 1u;
  return sign | static_cast<uint16_t>((rest - (112u << 23) + 0xfffu + odd) >> 13);
}

// A step rounded down would clip the channel's largest key. For x >= 0.
inline uint16_t float_to_half_not_below(float x) {
  const uint16_t h = float_to_half(x);
  return half_to_float(h) < x ? static_cast<uint16_t>(h + 1) : h;
}

inline float element(const void* data, int64_t index, int32_t dtype) {
  if (dtype == kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t h = static_cast<const uint16_t*>(data)[index];
  return dtype == kFloat16 ? half_to_float(h) : bits_to_float(static_cast<uint32_t>(h) << 16);
}

// ---- memory

struct Buffer {  // aligned floats, freed with their owner
  float* data = nullptr;
  size_t size = 0;

  ~Buffer() { free(data); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool reserve(size_t floats) {
    if (floats <= size) return true;
    free(data);
    data = nullptr;
    size = 0;
    void* p = nullptr;
    if (posix_memalign(&p, 64, floats * sizeof(float)) != 0) return false;
    data = static_cast<float*>(p);
    size = floats;
    return true;
  }
};

// What one thread needs while it works on a unit; kept for the thread's next unit.
struct Scratch {
  Buffer memory;
  float* keys;    // [D][64], dequantised tile
  float* values;  // [64][D]
  float* query;   // [panels][D][rows of the panel]
  float* scales;  // [D]
  float* p;       // [kMaxPanel][64], scores, then probabilities
  float* norms;   // [64], scales of the tile's values
  float* sums;    // [kBlockRows][vector], each row's sum of probabilities, in as many parts as a vector has lanes
  float* row;     // [D]
  int64_t first[kBlockRows];  // tokens that a row sees: first <= t < last
  int64_t last[kBlockRows];

  bool reserve(int head_dim) {
    const size_t d = static_cast<size_t>(head_dim);
    const size_t tile = kTile * d;
    if (!memory.reserve(2 * tile + kBlockRows * d + 2 * d + (kMaxPanel + 1) * kTile + kBlockRows * kMaxWidth)) {
      return false;
    }
    keys = memory.data;
    values = keys + tile;
    query = values + tile;
    scales = query + kBlockRows * d;
    row = scales + d;
    p = row + d;
    norms = p + kMaxPanel * kTile;
    sums = norms + kTile;
    return true;
  }
};

// ---- work

struct Source {  // keys and values of one KV head
  const int8_t* key_codes = nullptr;
  const uint16_t* key_scales = nullptr;
  float key_scale = 1.0f;
  const uint8_t* value_codes = nullptr;
  const uint16_t* value_scales = nullptr;
  const float* levels = nullptr;
  const void* dense_keys = nullptr;  // instead of codes
  const void* dense_values = nullptr;
  int64_t key_stride = 0;  // elements from token to token
  int64_t value_stride = 0;
  int32_t dtype = kFloat32;
  int64_t num_tokens = 0;
};

struct Visibility {  // which of a source's tokens row i of a request sees
  const int64_t* first_visible = nullptr;  // [rows], or null: all from the start
  int64_t offset = 0;                      // index of the source's first token in first_visible's counting
  int64_t causal_last = -1;                // row i sees tokens before causal_last + i; -1: all
  int64_t window = 0;                      // and at most this many; 0: no limit
};

struct Group;

struct Unit {  // some stacked rows over some tokens
  Source source;
  Visibility visibility;
  Group* group = nullptr;
  int64_t first_token = 0;  // a multiple of 64
  int64_t last_token = 0;
  float* acc = nullptr;  // [rows][D], not normalised, rotated like the values
  float* max = nullptr;  // [rows], in units of ln 2
  float* sum = nullptr;  // [rows]
};

struct Group {  // the units of the same rows: the last one to finish joins them
  const float* q = nullptr;  // first row's first query head
  float* out = nullptr;
  float* lse = nullptr;
  int64_t row_stride = 0;  // Hq * D
  int64_t lse_stride = 0;  // Hq
  int head_dim = 0;
  int heads = 0;  // query heads of this KV head
  int64_t first_row = 0;  // stacked row = request row * heads + head
  int rows = 0;
  float scale = 0.0f;
  const float* signs = nullptr;
  int hadamard_block = 0;
  Unit* units = nullptr;
  int num_units = 0;
  std::atomic<int> unfinished{0};
};

// ---- threads
//
// A small pool of our own: the OpenMP runtimes that torch and a wheel would each bring fight over the cores. The
// caller works too and waits only for workers that have begun, so a worker that the system does not schedule costs
// nothing.

struct Task {
  void (*run)(void* context, int64_t index);
  void* context;
  int64_t count;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(context, i);
  }
};

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  void run(Task& task, int threads) {
    if (threads <= 1 || task.count <= 1 || taken_.test_and_set(std::memory_order_acquire)) {  // one caller at a time
      task.work();
      return;
    }
    const int helpers = static_cast<int>(task.count < threads ? task.count : threads) - 1;
    pthread_mutex_lock(&mutex_);
    while (workers_ < helpers && start_worker()) {
    }
    task_ = &task;
    open_ = helpers;
    generation_.fetch_add(1, std::memory_order_release);
    if (sleeping_ > 0) pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&mutex_);
    task.work();
    pthread_mutex_lock(&mutex_);
    task_ = nullptr;
    open_ = 0;
    while (busy_ > 0) pthread_cond_wait(&done_, &mutex_);
    pthread_mutex_unlock(&mutex_);
    taken_.clear(std::memory_order_release);
  }

 private:
  static constexpr int kSpins = 500;

  bool start_worker() {
    try {
      std::thread(&Pool::serve, this).detach();
    } catch (...) {  // no more threads to be had: go on with fewer
      return false;
    }
    ++workers_;
    return true;
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) pause_cpu();
      pthread_mutex_lock(&mutex_);
      while (open_ == 0) {
        seen = generation_.load(std::memory_order_relaxed);
        ++sleeping_;
        pthread_cond_wait(&wake_, &mutex_);
        --sleeping_;
      }
      seen = generation_.load(std::memory_order_relaxed);
      --open_;
      ++busy_;
      Task* task = task_;
      pthread_mutex_unlock(&mutex_);
      task->work();
      pthread_mutex_lock(&mutex_);
      if (--busy_ == 0) pthread_cond_signal(&done_);
      pthread_mutex_unlock(&mutex_);
    }
  }

  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  pthread_cond_t done_ = PTHREAD_COND_INITIALIZER;
  std::atomic<uint64_t> generation_{0};
  Task* task_ = nullptr;
  int workers_ = 0;
  int sleeping_ = 0;
  int open_ = 0;  // helpers still wanted
  int busy_ = 0;
};

// Never destroyed: its workers outlive static destructors. A forked child has no workers and gets a new pool.
Pool* pool() {
  static std::atomic<Pool*> instance{nullptr};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { instance.store(new (std::nothrow) Pool); });
  (void)registered;
  Pool* p = instance.load(std::memory_order_acquire);
  if (p == nullptr) {
    Pool* fresh = new (std::nothrow) Pool;
    if (fresh != nullptr && !instance.compare_exchange_strong(p, fresh)) {
      delete fresh;
    } else {
      p = fresh;
    }
  }
  return p;
}

void parallel(void (*run)(void*, int64_t), void* context, int64_t count, int64_t work, int threads) {
  Task task{run, context, count};
  Pool* workers = work < kSerialWork ? nullptr : pool();
  if (workers != nullptr) {
    workers->run(task, threads);
  } else {
    task.work();
  }
}

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

struct Linear {  // y = x W^T + bias for some rows and outputs; strides count elements, last axes are contiguous
  const float* x = nullptr;      // [rows, inputs]
  const void* weight = nullptr;  // [outputs, inputs]
  const float* scales = nullptr; // [outputs, ceil(inputs / 64)] for int8 weights
  const float* bias = nullptr;   // [outputs], or null
  float* y = nullptr;            // [rows, outputs]
  int64_t x_stride = 0;
  int64_t weight_stride = 0;
  int64_t scale_stride = 0;
  int64_t y_stride = 0;
  int64_t rows = 0;
  int64_t outputs = 0;
  int64_t inputs = 0;
  int32_t dtype = kFloat32;  // of the weight
};

// What a pass over part 2 provides.
struct Kernels {
  const char* name;
  void (*attend)(const Unit&, Scratch&);
  void (*join)(const Group&, Scratch&);
  void (*merge)(const float* const* outs, const float* const* lses, int num_states, int64_t first_row,
                int64_t last_row, int64_t dim, float* out, float* lse);
  float (*encode_key_tile)(const void* keys, int64_t stride, int32_t dtype, int tokens, int head_dim, float step,
                           int8_t* codes, uint16_t* scales, Scratch&);
  float (*largest)(const void* data, int64_t stride, int32_t dtype, int64_t tokens, int head_dim);
  float (*encode_value)(const void* value, int32_t dtype, int head_dim, const float* signs, int block,
                        const float* levels, bool least_squares, uint8_t* codes, uint16_t* scale, Scratch&);
  bool (*linear)(const Linear&, Scratch&);  // false: no memory
  int linear_rows;                          // of a panel
};

}  // namespace

// --------------------------------------------------------------------- the passes over part 2, one a target

#define POLYKV_INLINE static inline __attribute__((always_inline))
#define POLYKV_UNROLL _Pragma("GCC unroll 16")
// A vector that several multiplies use stays in its register: compilers like to load it again for each of them.
#if defined(__x86_64__)
#define POLYKV_KEEP(x) asm("" : "+v"(x))
#elif defined(__aarch64__)
#define POLYKV_KEEP(x) asm("" : "+w"(x))
#else
#define POLYKV_KEEP(x) (void)(x)
#endif
#define POLYKV_KERNEL_PASS

namespace {
namespace portable {
#define POLYKV_PORTABLE
#include "polykv_cpu.cpp"  // NOLINT
#undef POLYKV_PORTABLE
}  // namespace portable
}  // namespace

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace {
namespace avx2 {
#define POLYKV_AVX2
#include "polykv_cpu.cpp"  // NOLINT
#undef POLYKV_AVX2
}  // namespace avx2
}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
namespace {
namespace avx512 {
#define POLYKV_AVX512
#include "polykv_cpu.cpp"  // NOLINT
#undef POLYKV_AVX512
}  // namespace avx512
}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#elif defined(__aarch64__)

namespace {
namespace neon {
#define POLYKV_NEON
#include "polykv_cpu.cpp"  // NOLINT
#undef POLYKV_NEON
}  // namespace neon
}  // namespace

#endif

#undef POLYKV_KERNEL_PASS

// ------------------------------------------------------------------------------------------ 3. C interface

namespace {

const Kernels* const* available_kernels(int* count) {
  static const Kernels* found[4];
  static const int n = [] {
    int k = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
    const bool avx2_usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    if (avx2_usable && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found[k++] = &avx512::kernels;
    }
    if (avx2_usable) found[k++] = &avx2::kernels;
#elif defined(__aarch64__)
    found[k++] = &neon::kernels;
#endif
    found[k++] = &portable::kernels;
    return k;
  }();
  *count = n;
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_acquire);
  if (k == nullptr) {
    int count = 0;
    k = available_kernels(&count)[0];
    chosen.store(k, std::memory_order_release);
  }
  return *k;
}

struct Plan {  // units and groups of one call, and the memory of their partial results
  const Kernels* kernels;
  Unit* units;
  std::atomic<bool> failed{false};
};

void run_unit(void* context, int64_t index) {
  Plan& plan = *static_cast<Plan*>(context);
  Unit& unit = plan.units[index];
  Group& group = *unit.group;
  Scratch& s = scratch();
  if (!s.reserve(group.head_dim)) {
    plan.failed.store(true);
    return;
  }
  plan.kernels->attend(unit, s);
  if (group.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) plan.kernels->join(group, s);
}

int64_t tiles_of(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// Depends on the tokens and KV heads alone, and not on the number of threads or rows: so a row's result is the same, bit for
// bit, on any number of threads and in any company.
int64_t tiles_per_unit(int64_t tiles, int64_t num_kv_heads, int32_t splits) {
  int64_t each;
  if (splits > 0) {
    each = (tiles + splits - 1) / splits;
  } else {
    each = tiles * num_kv_heads / kTargetUnits;
    if (each < kMinTilesPerUnit) each = kMinTilesPerUnit;
  }
  return each < 1 ? 1 : each;
}

// The same for a tail that its own rows are part of. A prompt computed in chunks of any sizes must give the same bits, so the
// division must not depend on where a chunk ends: it is fixed as long as that takes no undue memory.
int64_t tiles_per_causal_unit(int64_t tiles) {
  int64_t each = kMinTilesPerUnit;
  while (each * kMaxCausalUnits < tiles) each *= 2;
  return each;
}

Source dense_source(const PolykvDense& dense, int head) {
  Source s;
  const int64_t size = dense.dtype == kFloat32 ? 4 : 2;
  s.dense_keys = static_cast<const char*>(dense.keys) + head * dense.key_head_stride * size;
  s.dense_values = static_cast<const char*>(dense.values) + head * dense.value_head_stride * size;
  s.key_stride = dense.key_token_stride;
  s.value_stride = dense.value_token_stride;
  s.dtype = dense.dtype;
  s.num_tokens = dense.num_tokens;
  return s;
}

Source packed_source(const PolykvPacked& packed, int head) {
  Source s;
  s.key_codes = packed.key_codes + head * packed.key_head_stride;
  s.key_scales = packed.key_scales == nullptr ? nullptr : packed.key_scales + head * packed.key_scale_head_stride;
  s.key_scale = packed.key_scale;
  s.value_codes = packed.value_codes + head * packed.value_head_stride;
  s.value_scales = packed.value_scales + head * packed.value_scale_head_stride;
  s.levels = packed.levels;
  s.num_tokens = packed.num_tokens;
  return s;
}

bool supported(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  return num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 && head_dim > 0 && head_dim % 16 == 0 &&
         head_dim <= kMaxHeadDim;
}

template <class T>
T* allocate(int64_t count) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, (count > 0 ? count : 1) * sizeof(T)) != 0) return nullptr;
  return static_cast<T*>(p);
}

struct Request {  // some rows and the one or two sources they read
  const float* q;  // its first row
  float* out;
  float* lse;
  int64_t rows;
  const PolykvDense* dense;
  Visibility dense_visibility;
  const PolykvPacked* packed;
  Visibility packed_visibility;
  bool causal = false;  // the rows are the source's own last tokens
};

// Attention of every request's rows over its sources.
int32_t attend(const Request* requests, int64_t num_requests, int32_t num_heads, int32_t num_kv_heads,
               int32_t head_dim, float scale, int32_t splits, int32_t threads) {
  const int heads = num_heads / num_kv_heads;
  int64_t num_groups = 0, num_units = 0, partial_rows = 0, work = 0;
  // Twice over the same loops: first to count, then to fill.
  Group* groups = nullptr;
  Unit* units = nullptr;
  float* partial = nullptr;
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {
      groups = allocate<Group>(num_groups);
      units = allocate<Unit>(num_units);
      partial = allocate<float>(partial_rows * (head_dim + 2));
      if (groups == nullptr || units == nullptr || partial == nullptr) {
        free(groups);
        free(units);
        free(partial);
        return kNoMemory;
      }
    }
    int64_t g = 0, u = 0;
    float* next = partial;
    for (int64_t r = 0; r < num_requests; ++r) {
      const Request& request = requests[r];
      const int64_t stacked = request.rows * heads;
      const int64_t blocks = (stacked + kBlockRows - 1) / kBlockRows;
      const int64_t dense_tiles = request.dense == nullptr ? 0 : tiles_of(request.dense->num_tokens);
      const int64_t packed_tiles = request.packed == nullptr ? 0 : tiles_of(request.packed->num_tokens);
      const int64_t each = request.causal && splits == 0
                               ? tiles_per_causal_unit(dense_tiles)
                               : tiles_per_unit(dense_tiles + packed_tiles, num_kv_heads, splits);
      for (int head = 0; head < num_kv_heads; ++head) {
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t first_row = stacked * block / blocks;
          const int rows = static_cast<int>(stacked * (block + 1) / blocks - first_row);
          const int64_t first_unit = u;
          Group* group = nullptr;
          if (pass == 1) {
            group = new (&groups[g]) Group;
            group->q = request.q + static_cast<int64_t>(head) * heads * head_dim;
            group->out = request.out + static_cast<int64_t>(head) * heads * head_dim;
            group->lse = request.lse + static_cast<int64_t>(head) * heads;
            group->row_stride = static_cast<int64_t>(num_heads) * head_dim;
            group->lse_stride = num_heads;
            group->head_dim = head_dim;
            group->heads = heads;
            group->first_row = first_row;
            group->rows = rows;
            group->scale = scale;
            if (request.packed != nullptr) {
              group->signs = request.packed->signs;
              group->hadamard_block = request.packed->hadamard_block;
            }
            group->units = &units[u];
          }
          for (int kind = 0; kind < 2; ++kind) {
            const int64_t tiles = kind == 0 ? dense_tiles : packed_tiles;
            for (int64_t tile = 0; tile < tiles; tile += each, ++u) {
              if (pass == 0) {
                partial_rows += rows;
                continue;
              }
              Unit* unit = new (&units[u]) Unit;
              unit->source = kind == 0 ? dense_source(*request.dense, head) : packed_source(*request.packed, head);
              unit->visibility = kind == 0 ? request.dense_visibility : request.packed_visibility;
              unit->group = group;
              const int64_t tokens = unit->source.num_tokens;
              unit->first_token = tile * kTile;
              unit->last_token = (tile + each) * kTile < tokens ? (tile + each) * kTile : tokens;
              unit->acc = next;
              unit->max = next + static_cast<int64_t>(rows) * head_dim;
              unit->sum = unit->max + rows;
              next += static_cast<int64_t>(rows) * (head_dim + 2);
              work += 2 * (unit->last_token - unit->first_token) * rows * head_dim;
            }
          }
          if (pass == 1) {
            group->num_units = static_cast<int>(u - first_unit);
            group->unfinished.store(group->num_units);
          }
          ++g;
        }
      }
    }
    num_groups = g;
    num_units = u;
  }
  Plan plan{&kernels(), units};
  parallel(run_unit, &plan, num_units, work, threads);
  free(groups);
  free(units);
  free(partial);
  return plan.failed.load() ? kNoMemory : kOk;
}

}  // namespace

#define POLYKV_API extern "C" __attribute__((visibility("default")))

POLYKV_API int32_t polykv_cpu_abi_version() { return 2; }

// Name of the instruction set in use.
POLYKV_API const char* polykv_cpu_isa() { return kernels().name; }

// Name of the i-th instruction set that this processor has, best first; null past the last.
POLYKV_API const char* polykv_cpu_available_isa(int32_t i) {
  int count = 0;
  const Kernels* const* all = available_kernels(&count);
  return i >= 0 && i < count ? all[i]->name : nullptr;
}

POLYKV_API int32_t polykv_cpu_select_isa(const char* name) {
  int count = 0;
  const Kernels* const* all = available_kernels(&count);
  for (int i = 0; i < count; ++i) {
    if (strcmp(all[i]->name, name) == 0) {
      chosen.store(all[i], std::memory_order_release);
      return kOk;
    }
  }
  return kBadArgument;
}

// q and out [rows, Hq, D], lse [rows, Hq]. first_visible [rows] is the index of the first token that each row sees,
// counted from the segment's first (it may lie before or after the segment), or null. exact precedes packed.
POLYKV_API int32_t polykv_cpu_shared_attention(const float* q, int64_t rows, int32_t num_heads, int32_t num_kv_heads,
                                               int32_t head_dim, float scale, const PolykvDense* exact,
                                               const PolykvPacked* packed, const int64_t* first_visible, float* out,
                                               float* lse, int32_t splits, int32_t threads) {
  if (!supported(num_heads, num_kv_heads, head_dim) || rows <= 0) return kBadArgument;
  Request request{q, out, lse, rows, exact, {}, packed, {}};
  request.dense_visibility.first_visible = first_visible;
  request.packed_visibility.first_visible = first_visible;
  request.packed_visibility.offset = exact == nullptr ? 0 : exact->num_tokens;
  return attend(&request, 1, num_heads, num_kv_heads, head_dim, scale, splits, threads);
}

// Causal attention of each request's rows over its own tail, whose last tokens they are. window 0: none.
POLYKV_API int32_t polykv_cpu_ragged_attention(const float* q, int32_t num_heads, int32_t num_kv_heads,
                                               int32_t head_dim, float scale, const PolykvDense* tails,
                                               const int64_t* row_counts, int64_t num_requests, int64_t window,
                                               float* out, float* lse, int32_t splits, int32_t threads) {
  if (!supported(num_heads, num_kv_heads, head_dim) || num_requests <= 0) return kBadArgument;
  Request* requests = allocate<Request>(num_requests);
  if (requests == nullptr) return kNoMemory;
  int64_t first = 0;
  for (int64_t i = 0; i < num_requests; ++i) {
    const int64_t row = static_cast<int64_t>(num_heads) * head_dim;
    Request* request = new (&requests[i])
        Request{q + first * row, out + first * row, lse + first * num_heads, row_counts[i], &tails[i], {}, nullptr, {}};
    request->dense_visibility.causal_last = tails[i].num_tokens - row_counts[i] + 1;
    request->dense_visibility.window = window;
    request->causal = true;
    first += row_counts[i];
  }
  const int32_t status =
      attend(requests, num_requests, num_heads, num_kv_heads, head_dim, scale, splits, threads);
  free(requests);
  return status;
}

// Copies new keys and values, [rows, Hkv, D] with the given strides in elements of `element` bytes, to the ends of the tails:
// tails[i].num_tokens counts its row_counts[i] new tokens already.
POLYKV_API int32_t polykv_cpu_append(const void* keys, const void* values, int64_t key_row_stride,
                                     int64_t key_head_stride, int64_t value_row_stride, int64_t value_head_stride,
                                     int32_t num_kv_heads, int32_t head_dim, int32_t element, const PolykvDense* tails,
                                     const int64_t* row_counts, int64_t num_requests) {
  const size_t bytes = static_cast<size_t>(head_dim) * element;
  int64_t row = 0;
  for (int64_t i = 0; i < num_requests; ++i) {
    const PolykvDense& tail = tails[i];
    for (int64_t token = tail.num_tokens - row_counts[i]; token < tail.num_tokens; ++token, ++row) {
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        const int64_t key = head * tail.key_head_stride + token * tail.key_token_stride;
        const int64_t value = head * tail.value_head_stride + token * tail.value_token_stride;
        memcpy(static_cast<char*>(const_cast<void*>(tail.keys)) + key * element,
               static_cast<const char*>(keys) + (row * key_row_stride + head * key_head_stride) * element, bytes);
        memcpy(static_cast<char*>(const_cast<void*>(tail.values)) + value * element,
               static_cast<const char*>(values) + (row * value_row_stride + head * value_head_stride) * element, bytes);
      }
    }
  }
  return kOk;
}

namespace {

struct MergeCall {
  const Kernels* kernels;
  const float* const* outs;
  const float* const* lses;
  int num_states;
  int64_t rows, dim, chunk;
  float* out;
  float* lse;
};

void run_merge(void* context, int64_t index) {
  const MergeCall& c = *static_cast<MergeCall*>(context);
  const int64_t first = index * c.chunk;
  const int64_t last = first + c.chunk < c.rows ? first + c.chunk : c.rows;
  c.kernels->merge(c.outs, c.lses, c.num_states, first, last, c.dim, c.out, c.lse);
}

}  // namespace

// outs [num_states] of [rows, dim], lses [num_states] of [rows]. out and lse may be those of a state.
POLYKV_API int32_t polykv_cpu_merge(const float* const* outs, const float* const* lses, int32_t num_states,
                                    int64_t rows, int64_t dim, float* out, float* lse, int32_t threads) {
  if (num_states <= 0 || rows < 0 || dim < 0) return kBadArgument;
  MergeCall call{&kernels(), outs, lses, num_states, rows, dim, 64, out, lse};
  parallel(run_merge, &call, (rows + call.chunk - 1) / call.chunk, rows * dim * num_states, threads);
  return kOk;
}

namespace {

struct KeysCall {
  const Kernels* kernels;
  const void* keys;
  int64_t head_stride, token_stride, tokens, tiles;
  int32_t dtype;
  int head_dim;
  float step;
  int8_t* codes;
  uint16_t* scales;
  std::atomic<bool> overflow{false}, no_memory{false};
};

void run_keys(void* context, int64_t index) {
  KeysCall& c = *static_cast<KeysCall*>(context);
  const int64_t head = index / c.tiles, tile = index % c.tiles;
  const int64_t left = c.tokens - tile * kTile;
  const int64_t at = head * c.head_stride + tile * kTile * c.token_stride;
  Scratch& s = scratch();
  if (!s.reserve(c.head_dim)) {
    c.no_memory.store(true);
    return;
  }
  const float largest_scale = c.kernels->encode_key_tile(
      static_cast<const char*>(c.keys) + at * (c.dtype == kFloat32 ? 4 : 2), c.token_stride, c.dtype,
      static_cast<int>(left < kTile ? left : kTile), c.head_dim, c.step, c.codes + index * c.head_dim * kTile,
      c.scales == nullptr ? nullptr : c.scales + index * c.head_dim, s);
  if (!(largest_scale <= 65504.0f)) c.overflow.store(true);
}

}  // namespace

// codes [Hkv, n_tiles, D, 64]; scales float16 [Hkv, n_tiles, D], or null: one scale for all, to tensor_scale.
POLYKV_API int32_t polykv_cpu_encode_keys(const void* keys, int32_t dtype, int64_t head_stride, int64_t token_stride,
                                          int32_t num_kv_heads, int64_t tokens, int32_t head_dim, int8_t* codes,
                                          uint16_t* scales, float* tensor_scale, int32_t threads) {
  if (!supported(num_kv_heads, num_kv_heads, head_dim) || tokens <= 0) return kBadArgument;
  float step = 0.0f;
  if (scales == nullptr) {
    float largest = 0.0f;
    for (int head = 0; head < num_kv_heads; ++head) {
      const char* at = static_cast<const char*>(keys) + head * head_stride * (dtype == kFloat32 ? 4 : 2);
      const float x = kernels().largest(at, token_stride, dtype, tokens, head_dim);
      largest = x > largest ? x : largest;
    }
    *tensor_scale = step = largest / 127.0f;
  }
  KeysCall call{&kernels(), keys, head_stride, token_stride, tokens, tiles_of(tokens), dtype, head_dim, step, codes,
                scales};
  parallel(run_keys, &call, num_kv_heads * call.tiles, 4 * num_kv_heads * tokens * head_dim, threads);
  return call.no_memory.load() ? kNoMemory : call.overflow.load() ? kOverflow : kOk;
}

namespace {

struct ValuesCall {
  const Kernels* kernels;
  const void* values;
  int64_t head_stride, token_stride, tokens, tiles;
  int32_t dtype;
  int head_dim;
  const float* signs;
  int block;
  const float* levels;
  bool least_squares;
  uint8_t* codes;
  uint16_t* scales;
  std::atomic<bool> overflow{false}, no_memory{false};
};

void run_values(void* context, int64_t index) {
  ValuesCall& c = *static_cast<ValuesCall*>(context);
  const int64_t head = index / c.tiles, first = index % c.tiles * kTile;
  const int64_t last = first + kTile < c.tokens ? first + kTile : c.tokens;
  Scratch& s = scratch();
  if (!s.reserve(c.head_dim)) {
    c.no_memory.store(true);
    return;
  }
  for (int64_t t = first; t < last; ++t) {
    const int64_t at = head * c.head_stride + t * c.token_stride, row = head * c.tokens + t;
    const float scale = c.kernels->encode_value(
        static_cast<const char*>(c.values) + at * (c.dtype == kFloat32 ? 4 : 2), c.dtype, c.head_dim, c.signs, c.block,
        c.levels, c.least_squares, c.codes + row * (3 * c.head_dim / 8), c.scales + row, s);
    if (!(scale < 65520.0f)) c.overflow.store(true);
  }
}

}  // namespace

// codes [Hkv, T, 3 D / 8], scales float16 [Hkv, T].
POLYKV_API int32_t polykv_cpu_encode_values(const void* values, int32_t dtype, int64_t head_stride,
                                            int64_t token_stride, int32_t num_kv_heads, int64_t tokens,
                                            int32_t head_dim, const float* signs, int32_t hadamard_block,
                                            const float* levels, int32_t least_squares, uint8_t* codes,
                                            uint16_t* scales, int32_t threads) {
  if (!supported(num_kv_heads, num_kv_heads, head_dim) || tokens <= 0) return kBadArgument;
  ValuesCall call{&kernels(),   values,         head_stride, token_stride,       tokens, tiles_of(tokens), dtype,
                  head_dim,     signs,          hadamard_block, levels, least_squares != 0, codes, scales};
  parallel(run_values, &call, num_kv_heads * call.tiles, 16 * num_kv_heads * tokens * head_dim, threads);
  return call.no_memory.load() ? kNoMemory : call.overflow.load() ? kOverflow : kOk;
}

namespace {

struct LinearCall {
  const Kernels* kernels;
  Linear whole;
  int64_t unit_outputs, unit_rows, row_units;
  std::atomic<bool> failed{false};
};

void run_linear(void* context, int64_t index) {
  LinearCall& c = *static_cast<LinearCall*>(context);
  // units that share weights follow each other, so that all but the first find them in a cache
  const int64_t output = index / c.row_units * c.unit_outputs, row = index % c.row_units * c.unit_rows;
  Linear part = c.whole;
  const int64_t size = part.dtype == kFloat32 ? 4 : part.dtype == kInt8 ? 1 : 2;
  part.x += row * part.x_stride;
  part.weight = static_cast<const char*>(part.weight) + output * part.weight_stride * size;
  if (part.scales != nullptr) part.scales += output * part.scale_stride;
  if (part.bias != nullptr) part.bias += output;
  part.y += row * part.y_stride + output;
  part.rows = part.rows - row < c.unit_rows ? part.rows - row : c.unit_rows;
  part.outputs = part.outputs - output < c.unit_outputs ? part.outputs - output : c.unit_outputs;
  if (!c.kernels->linear(part, scratch())) c.failed.store(true);
}

}  // namespace

// y [rows, outputs] = x [rows, inputs] W^T + bias [outputs] (or null). weight [outputs, inputs] of any Dtype; scales
// [outputs, ceil(inputs / 64)] for int8, else null. A number of y has the same bits in any company of rows and on any number
// of threads.
POLYKV_API int32_t polykv_cpu_linear(const float* x, int64_t rows, int64_t x_stride, const void* weight, int32_t dtype,
                                     int64_t weight_stride, const float* scales, int64_t scale_stride,
                                     const float* bias, int64_t outputs, int64_t inputs, float* y, int32_t threads) {
  if (rows < 0 || outputs < 0 || inputs <= 0 || dtype < kFloat32 || dtype > kInt8) return kBadArgument;
  if ((dtype == kInt8) != (scales != nullptr)) return kBadArgument;
  if (rows == 0 || outputs == 0) return kOk;
  LinearCall call;
  call.kernels = &kernels();
  call.whole = Linear{x, weight, scales, bias, y, x_stride, weight_stride, scale_stride, outputs, rows, outputs, inputs,
                      dtype};
  const int64_t weights = outputs * inputs;
  // in multiply-adds; a weight takes as long to fetch as some of them
  const int64_t work = weights * (rows > kFetchRows ? rows : kFetchRows);
  if (work < kSerialLinear) threads = 1;
  const int64_t wanted = threads > 1 ? (outputs / (threads * kUnitsPerThread) + 3) / 4 * 4 : kMaxUnitOutputs;
  call.unit_outputs = wanted < kMinUnitOutputs ? kMinUnitOutputs : wanted > kMaxUnitOutputs ? kMaxUnitOutputs : wanted;
  const int64_t panel = call.kernels->linear_rows, most = kMaxUnitRows / panel * panel;
  call.unit_rows = rows < most ? rows : most;
  call.row_units = (rows + call.unit_rows - 1) / call.unit_rows;
  parallel(run_linear, &call, (outputs + call.unit_outputs - 1) / call.unit_outputs * call.row_units,
           threads > 1 ? kSerialWork : 0, threads);
  return call.failed.load() ? kNoMemory : kOk;
}

#else  // POLYKV_KERNEL_PASS

// ---------------------------------------------------------------------------------------------- 2. kernels
//
// No #include and no function of the standard library in here: it would be compiled under this pass's target options,
// and the linker might give that copy to everybody.

// ---- vectors: vf holds kWidth floats. A panel is kPanel rows at most; in the multiply, MR of them times vectors_for(MR)
// vectors of columns are accumulated in registers.

#if defined(POLYKV_AVX512)

using vf = __m512;
constexpr int kWidth = 16;
constexpr int kPanel = 12;
constexpr int vectors_for(int rows) { return rows <= 6 ? 4 : 2; }  // 24 of 32 registers

POLYKV_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
POLYKV_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
POLYKV_INLINE vf all(float x) { return _mm512_set1_ps(x); }
POLYKV_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
POLYKV_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
POLYKV_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
POLYKV_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
POLYKV_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if either is NaN
POLYKV_INLINE float largest_lane(vf x) { return _mm512_reduce_max_ps(x); }
POLYKV_INLINE float sum_lanes(vf x) { return _mm512_reduce_add_ps(x); }
POLYKV_INLINE vf load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
POLYKV_INLINE vf load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
POLYKV_INLINE vf load_bfloat(const uint16_t* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
POLYKV_INLINE vf scale_by_power(vf x, vf n) { return _mm512_scalef_ps(x, n); }
POLYKV_INLINE vf nearest_integer(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

POLYKV_INLINE vf butterfly(vf x, int h) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bit = _mm512_set1_epi32(h);
  const vf partner = _mm512_permutexvar_ps(_mm512_xor_epi32(lane, bit), x);
  return _mm512_mask_sub_ps(_mm512_add_ps(partner, x), _mm512_test_epi32_mask(lane, bit), partner, x);
}

#elif defined(POLYKV_AVX2)

using vf = __m256;
constexpr int kWidth = 8;
constexpr int kPanel = 6;
constexpr int vectors_for(int) { return 2; }  // 12 of 16 registers

POLYKV_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
POLYKV_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
POLYKV_INLINE vf all(float x) { return _mm256_set1_ps(x); }
POLYKV_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
POLYKV_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
POLYKV_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
POLYKV_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
POLYKV_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b if either is NaN
POLYKV_INLINE float largest_lane(vf x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
POLYKV_INLINE float sum_lanes(vf x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
POLYKV_INLINE vf load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
POLYKV_INLINE vf load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
POLYKV_INLINE vf load_bfloat(const uint16_t* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
POLYKV_INLINE vf scale_by_power(vf x, vf n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}
POLYKV_INLINE vf nearest_integer(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

POLYKV_INLINE vf butterfly(vf x, int h) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i bit = _mm256_set1_epi32(h);
  const vf partner = _mm256_permutevar8x32_ps(x, _mm256_xor_si256(lane, bit));
  const __m256i upper = _mm256_cmpeq_epi32(_mm256_and_si256(lane, bit), bit);
  return _mm256_blendv_ps(_mm256_add_ps(partner, x), _mm256_sub_ps(partner, x), _mm256_castsi256_ps(upper));
}

#elif defined(POLYKV_NEON)

using vf = float32x4_t;
constexpr int kWidth = 4;
constexpr int kPanel = 6;
constexpr int vectors_for(int) { return 4; }  // 24 of 32 registers

POLYKV_INLINE vf load(const float* p) { return vld1q_f32(p); }
POLYKV_INLINE void store(float* p, vf x) { vst1q_f32(p, x); }
POLYKV_INLINE vf all(float x) { return vdupq_n_f32(x); }
POLYKV_INLINE vf add(vf a, vf b) { return vaddq_f32(a, b); }
POLYKV_INLINE vf sub(vf a, vf b) { return vsubq_f32(a, b); }
POLYKV_INLINE vf mul(vf a, vf b) { return vmulq_f32(a, b); }
POLYKV_INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
POLYKV_INLINE vf max(vf a, vf b) { return vmaxq_f32(a, b); }  // NaN if either is
POLYKV_INLINE float largest_lane(vf x) { return vmaxvq_f32(x); }
POLYKV_INLINE float sum_lanes(vf x) { return vaddvq_f32(x); }
POLYKV_INLINE vf load_int8(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
POLYKV_INLINE vf load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
POLYKV_INLINE vf load_bfloat(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16));
}
POLYKV_INLINE vf scale_by_power(vf x, vf n) {
  const int32x4_t e = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
}
POLYKV_INLINE vf nearest_integer(vf x) { return vrndnq_f32(x); }

#else  // POLYKV_PORTABLE: the compiler's own vectors, which every target has or takes apart

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kPanel = 6;
constexpr int vectors_for(int) { return 2; }

POLYKV_INLINE vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}
POLYKV_INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
POLYKV_INLINE vf all(float x) { return vf{x, x, x, x}; }
POLYKV_INLINE vf add(vf a, vf b) { return a + b; }
POLYKV_INLINE vf sub(vf a, vf b) { return a - b; }
POLYKV_INLINE vf mul(vf a, vf b) { return a * b; }
POLYKV_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
POLYKV_INLINE vf max(vf a, vf b) { return a > b ? a : b; }  // b if either is NaN
POLYKV_INLINE float largest_lane(vf x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
POLYKV_INLINE float sum_lanes(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
POLYKV_INLINE vf load_int8(const int8_t* p) {
  return vf{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}
POLYKV_INLINE vf load_half(const uint16_t* p) {
  return vf{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
POLYKV_INLINE vf load_bfloat(const uint16_t* p) {
  const vi bits{p[0], p[1], p[2], p[3]};
  return reinterpret_cast<vf>(bits << 16);
}
// n is kMagic + an integer here, whose low bits are that integer
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
POLYKV_INLINE vf scale_by_power(vf x, vf n) {
  const vi e = reinterpret_cast<vi>(n + kMagic) - reinterpret_cast<vi>(all(kMagic)) + 127;
  return x * reinterpret_cast<vf>(e << 23);
}
POLYKV_INLINE vf nearest_integer(vf x) { return (x + kMagic) - kMagic; }

#endif

// 2^x for x <= 0, within 1 ulp or so; 0 below the smallest normal number, NaN for NaN. Scores are kept in units of ln 2,
// which saves the range reduction of e^x. The polynomial is fitted to 2^r on [-1/2, 1/2], relative error 2e-9, and is 1
// at 0.
POLYKV_INLINE vf power_of_two(vf x) {
#if defined(POLYKV_AVX512)
  const vf n = nearest_integer(x);
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // x - n, and 0 for infinity
#else
  const vf smallest = all(-126.0f);
  const vf clamped = max(smallest, x);
  const vf n = nearest_integer(clamped);
  const vf r = sub(clamped, n);
#endif
  vf y = all(1.5353357594e-4f);
  y = fma(y, r, all(1.3398878509e-3f));
  y = fma(y, r, all(9.6184378490e-3f));
  y = fma(y, r, all(5.5503323674e-2f));
  y = fma(y, r, all(2.4022647738e-1f));
  y = fma(y, r, all(6.9314718246e-1f));
  y = fma(y, r, all(1.0f));
  y = scale_by_power(y, n);
#if defined(POLYKV_AVX512)
  return y;
#elif defined(POLYKV_AVX2)
  return _mm256_andnot_ps(_mm256_cmp_ps(x, smallest, _CMP_LT_OQ), y);
#elif defined(POLYKV_NEON)
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, smallest)));
#else
  return x < smallest ? all(0.0f) : y;
#endif
}

POLYKV_INLINE float power_of_two_of(float x) {
  float lanes[kWidth];
  store(lanes, power_of_two(all(x)));
  return lanes[0];
}

POLYKV_INLINE vf load_as(const void* data, int64_t index, int32_t dtype) {
  if (dtype == kFloat32) return load(static_cast<const float*>(data) + index);
  const uint16_t* p = static_cast<const uint16_t*>(data) + index;
  return dtype == kFloat16 ? load_half(p) : load_bfloat(p);
}

// ---- operands of the multiply: each can give a few neighbouring vectors
//
// Codes are read from memory once, a tile in several short runs that processors' own prefetchers miss: while a tile is
// used, the same place of the next one is asked for (past the end of an array that does nothing).

struct FloatKeys {  // [D][64]
  const float* data;
  template <int N>
  POLYKV_INLINE void get(const FloatKeys& self, int channel, int token, vf (&x)[N]) {
    const float* p = self.data + channel * kTile + token;
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) x[j] = load(p + j * kWidth);
  }
};

struct CodeKeys {  // [D][64] int8
  const int8_t* data;
  const float* scales;  // [D]
  int64_t next;         // bytes to the next tile
  template <int N>
  POLYKV_INLINE void get(const CodeKeys& self, int channel, int token, vf (&x)[N]) {
    const int8_t* p = self.data + channel * kTile + token;
    if (token == 0) __builtin_prefetch(p + self.next);
    const vf scale = all(self.scales[channel]);
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) x[j] = mul(load_int8(p + j * kWidth), scale);  // exact: 8 + 11 bits
  }
};

struct FloatValues {  // [tokens][D]
  const float* data;
  int64_t stride;
  template <int N>
  POLYKV_INLINE void get(const FloatValues& self, int token, int channel, vf (&x)[N]) {
    const float* p = self.data + token * self.stride + channel;
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) x[j] = load(p + j * kWidth);
  }
};

// Levels of 3-bit codes; the token's scale is folded into its probability. Sixteen codes are six bytes: codes 0..7 lie
// in the word at byte 0 from bit 0 on, codes 8..15 in the word at byte 2 from bit 8 on. So four-byte loads never leave
// the row.
struct CodeValues {
  const uint8_t* data;
  int row_bytes;
#if defined(POLYKV_AVX512)
  vf table;  // the eight levels twice: a permutation looks at four bits, of which one is the next code's
  __m512i shifts;
  CodeValues(const uint8_t* codes, int head_dim, const float* levels)
      : data(codes),
        row_bytes(3 * head_dim / 8),
        table(_mm512_broadcast_f32x8(_mm256_loadu_ps(levels))),
        shifts(_mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 8, 11, 14, 17, 20, 23, 26, 29)) {}
  template <int N>
  POLYKV_INLINE void get(const CodeValues& self, int token, int channel, vf (&x)[N]) {
    const uint8_t* p = self.data + token * self.row_bytes + channel / 8 * 3;
    if (channel == 0) __builtin_prefetch(p + kTile * self.row_bytes);
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) {
      const __m128i low = _mm_loadu_si32(p + 6 * j), high = _mm_loadu_si32(p + 6 * j + 2);
      const __m512i words = _mm512_mask_broadcastd_epi32(_mm512_broadcastd_epi32(low), 0xff00, high);
      x[j] = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, self.shifts), self.table);
    }
  }
#elif defined(POLYKV_AVX2)
  vf table;
  __m256i low_shifts, high_shifts;
  CodeValues(const uint8_t* codes, int head_dim, const float* levels)
      : data(codes),
        row_bytes(3 * head_dim / 8),
        table(_mm256_loadu_ps(levels)),
        low_shifts(_mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21)),
        high_shifts(_mm256_setr_epi32(8, 11, 14, 17, 20, 23, 26, 29)) {}
  template <int N>
  POLYKV_INLINE void get(const CodeValues& self, int token, int channel, vf (&x)[N]) {
    static_assert(N % 2 == 0, "sixteen codes at a time");
    const uint8_t* p = self.data + token * self.row_bytes + channel / 8 * 3;
    if (channel == 0) __builtin_prefetch(p + kTile * self.row_bytes);
    POLYKV_UNROLL
    for (int j = 0; j < N; j += 2) {
      int32_t low, high;
      memcpy(&low, p + 3 * j, 4);
      memcpy(&high, p + 3 * j + 2, 4);
      // a permutation looks at the low three bits only, so nothing needs to be masked
      x[j] = _mm256_permutevar8x32_ps(self.table, _mm256_srlv_epi32(_mm256_set1_epi32(low), self.low_shifts));
      x[j + 1] = _mm256_permutevar8x32_ps(self.table, _mm256_srlv_epi32(_mm256_set1_epi32(high), self.high_shifts));
    }
  }
#elif defined(POLYKV_NEON)
  uint8x16x2_t table;
  CodeValues(const uint8_t* codes, int head_dim, const float* levels) : data(codes), row_bytes(3 * head_dim / 8) {
    table.val[0] = vreinterpretq_u8_f32(vld1q_f32(levels));
    table.val[1] = vreinterpretq_u8_f32(vld1q_f32(levels + 4));
  }
  POLYKV_INLINE vf look_up(const CodeValues& self, uint32_t word, int32x4_t right_shifts) {
    const uint32x4_t code = vandq_u32(vshlq_u32(vdupq_n_u32(word), right_shifts), vdupq_n_u32(7));
    // byte b of level c is byte 4 c + b of the table
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100u), code, vdupq_n_u32(0x04040404u));
    return vreinterpretq_f32_u8(vqtbl2q_u8(self.table, vreinterpretq_u8_u32(bytes)));
  }
  template <int N>
  POLYKV_INLINE void get(const CodeValues& self, int token, int channel, vf (&x)[N]) {
    static_assert(N % 4 == 0, "sixteen codes at a time");
    const uint8_t* p = self.data + token * self.row_bytes + channel / 8 * 3;
    if (channel == 0) __builtin_prefetch(p + kTile * self.row_bytes);
    POLYKV_UNROLL
    for (int j = 0; j < N; j += 4) {
      uint32_t low, high;
      memcpy(&low, p + 3 * j / 2, 4);
      memcpy(&high, p + 3 * j / 2 + 2, 4);
      x[j] = look_up(self, low, int32x4_t{0, -3, -6, -9});
      x[j + 1] = look_up(self, low, int32x4_t{-12, -15, -18, -21});
      x[j + 2] = look_up(self, high, int32x4_t{-8, -11, -14, -17});
      x[j + 3] = look_up(self, high, int32x4_t{-20, -23, -26, -29});
    }
  }
#else
  const float* table;
  CodeValues(const uint8_t* codes, int head_dim, const float* levels)
      : data(codes), row_bytes(3 * head_dim / 8), table(levels) {}
  template <int N>
  POLYKV_INLINE void get(const CodeValues& self, int token, int channel, vf (&x)[N]) {
    static_assert(N % 2 == 0, "eight codes at a time");
    const uint8_t* p = self.data + token * self.row_bytes + channel / 8 * 3;
    if (channel == 0) __builtin_prefetch(p + kTile * self.row_bytes);
    for (int j = 0; j < N; j += 2, p += 3) {
      const uint32_t w = p[0] | p[1] << 8 | p[2] << 16;
      const float* t = self.table;
      x[j] = vf{t[w & 7], t[w >> 3 & 7], t[w >> 6 & 7], t[w >> 9 & 7]};
      x[j + 1] = vf{t[w >> 12 & 7], t[w >> 15 & 7], t[w >> 18 & 7], t[w >> 21 & 7]};
    }
  }
#endif
};

// ---- the multiply

// s[r][t] = factor * sum_d q[d][r] * keys[d][t] for MR rows and the tokens of a tile.
template <int MR, class Keys>
static void scores(const float* q, const Keys& keys, int head_dim, int tokens, float factor, float* s) {
  constexpr int kN = vectors_for(MR);
  for (int t = 0; t < tokens; t += kWidth * kN) {
    for (int first = 0; first < head_dim; first += kSumChannels) {
      const int last = first + kSumChannels < head_dim ? first + kSumChannels : head_dim;
      vf acc[MR][kN];
      POLYKV_UNROLL
      for (int r = 0; r < MR; ++r) {
        POLYKV_UNROLL
        for (int j = 0; j < kN; ++j) acc[r][j] = all(0.0f);
      }
      for (int d = first; d < last; ++d) {
        vf k[kN];
        Keys::template get<kN>(keys, d, t, k);
        POLYKV_UNROLL
        for (int j = 0; j < kN; ++j) POLYKV_KEEP(k[j]);
        POLYKV_UNROLL
        for (int r = 0; r < MR; ++r) {
          const vf a = all(q[d * MR + r]);
          POLYKV_UNROLL
          for (int j = 0; j < kN; ++j) acc[r][j] = fma(a, k[j], acc[r][j]);
        }
      }
      const vf f = all(factor);  // on q it would be rounded D times
      POLYKV_UNROLL
      for (int r = 0; r < MR; ++r) {
        POLYKV_UNROLL
        for (int j = 0; j < kN; ++j) {
          float* to = s + r * kTile + t + j * kWidth;
          store(to, first == 0 ? mul(acc[r][j], f) : fma(acc[r][j], f, load(to)));
        }
      }
    }
  }
}

// acc[r][d] = correction[r] * acc[r][d] + sum_t p[r][t] * values[t][d] for MR rows and N vectors of channels.
template <int MR, int N, class Values>
POLYKV_INLINE void add_values_block(const float* p, const float* correction, const Values& values, int tokens,
                                    int head_dim, int channel, float* acc) {
  vf a[MR][N];
  POLYKV_UNROLL
  for (int r = 0; r < MR; ++r) {
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) a[r][j] = all(0.0f);
  }
  for (int t = 0; t < tokens; ++t) {
    vf v[N];
    Values::template get<N>(values, t, channel, v);
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) POLYKV_KEEP(v[j]);
    POLYKV_UNROLL
    for (int r = 0; r < MR; ++r) {
      const vf w = all(p[r * kTile + t]);
      POLYKV_UNROLL
      for (int j = 0; j < N; ++j) a[r][j] = fma(w, v[j], a[r][j]);
    }
  }
  POLYKV_UNROLL
  for (int r = 0; r < MR; ++r) {
    POLYKV_UNROLL
    for (int j = 0; j < N; ++j) {
      float* to = acc + r * head_dim + channel + j * kWidth;
      store(to, fma(load(to), all(correction[r]), a[r][j]));  // last: a sum of tiles' sums rounds less than one long sum
    }
  }
}

template <int MR, class Values>
static void add_values(const float* p, const float* correction, const Values& values, int tokens, int head_dim,
                       float* acc) {
  constexpr int kN = vectors_for(MR);
  int channel = 0;
  for (; channel + kWidth * kN <= head_dim; channel += kWidth * kN) {
    add_values_block<MR, kN, Values>(p, correction, values, tokens, head_dim, channel, acc);
  }
#if defined(POLYKV_AVX512)  // its blocks are up to 64 wide, head dims multiples of 16; elsewhere blocks divide head dims
  for (; channel < head_dim; channel += kWidth) {
    add_values_block<MR, 1, Values>(p, correction, values, tokens, head_dim, channel, acc);
  }
#endif
}

// Scores of one row to probabilities relative to the new maximum. Returns the factor for what came before. norms, if there
// are any, are multiplied into the probabilities once these have been summed: the scale of a value goes with its
// probability. The sum is kept in kWidth parts, to be added up when the last tile is done. kWhole: the row sees all 64 tokens of the tile, which lets everything be unrolled.
template <bool kWhole>
POLYKV_INLINE float online_softmax(float* s, int first, int last, int tokens, const float* norms, float* max_,
                                   float* sums) {
  const int padded = kWhole ? kTile : (tokens + kWidth - 1) / kWidth * kWidth;
  if (!kWhole) {
    for (int t = 0; t < first; ++t) s[t] = -kInf;
    for (int t = last; t < padded; ++t) s[t] = -kInf;
  }
  vf m = load(s);
  POLYKV_UNROLL
  for (int t = kWidth; t < padded; t += kWidth) m = max(m, load(s + t));
  const float tile_max = largest_lane(m), old_max = *max_;
  const float new_max = tile_max > old_max ? tile_max : old_max;
  // a row that has seen no key yet has maximum -inf, and -inf - -inf is not a number
  const float base = new_max == -kInf ? 0.0f : new_max;
  const vf b = all(base);
  vf total = all(0.0f);
  POLYKV_UNROLL
  for (int t = 0; t < padded; t += kWidth) {
    const vf p = power_of_two(sub(load(s + t), b));
    total = add(total, p);
    store(s + t, norms == nullptr ? p : mul(p, load(norms + t)));
  }
  const float correction = old_max == new_max ? 1.0f : power_of_two_of(old_max - base);
  store(sums, fma(load(sums), all(correction), total));
  *max_ = new_max;
  return correction;
}

// ---- tiles

POLYKV_INLINE void half_to_floats(const uint16_t* h, int count, float* x) {  // count a multiple of 16
  for (int i = 0; i < count; i += kWidth) store(x + i, load_half(h + i));
}

static void dequantise_keys(const int8_t* codes, const float* scales, int head_dim, float* keys) {
  for (int d = 0; d < head_dim; ++d) {
    const vf s = all(scales[d]);
    __builtin_prefetch(codes + (head_dim + d) * kTile);
    POLYKV_UNROLL
    for (int t = 0; t < kTile; t += kWidth) {
      store(keys + d * kTile + t, mul(load_int8(codes + d * kTile + t), s));
    }
  }
}

static void dequantise_values(const CodeValues& codes, int tokens, int head_dim, float* values) {
  constexpr int kN = 16 / kWidth;
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < head_dim; d += 16) {
      vf x[kN];
      CodeValues::get<kN>(codes, t, d, x);
      POLYKV_UNROLL
      for (int j = 0; j < kN; ++j) store(values + t * head_dim + d + j * kWidth, x[j]);
    }
  }
}

#if defined(POLYKV_AVX512) || defined(POLYKV_AVX2)
POLYKV_INLINE void transpose_8x8(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m256 a[8], b[8];
  POLYKV_UNROLL
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(in + i * in_stride);
  POLYKV_UNROLL
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  POLYKV_UNROLL
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  POLYKV_UNROLL
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#else
POLYKV_INLINE void transpose_8x8(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) out[j * out_stride + i] = in[i * in_stride + j];
  }
}
#endif

static void to_floats(const void* rows, int64_t first, int64_t stride, int32_t dtype, int tokens, int head_dim,
                      float* x) {
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < head_dim; d += kWidth) store(x + t * head_dim + d, load_as(rows, first + t * stride + d, dtype));
  }
}

// Dense token-major keys to [D][64]; columns past the last token become 0.
static void transpose_keys(const Source& source, int64_t token, int tokens, int head_dim, float* staging,
                           float* keys) {
  const float* rows;
  int64_t stride;
  if (source.dtype == kFloat32) {
    rows = static_cast<const float*>(source.dense_keys) + token * source.key_stride;
    stride = source.key_stride;
  } else {
    to_floats(source.dense_keys, token * source.key_stride, source.key_stride, source.dtype, tokens, head_dim, staging);
    rows = staging;
    stride = head_dim;
  }
  int t = 0;
  for (; t + 8 <= tokens; t += 8) {
    for (int d = 0; d < head_dim; d += 8) transpose_8x8(rows + t * stride + d, stride, keys + d * kTile + t, kTile);
  }
  for (; t < tokens; ++t) {
    for (int d = 0; d < head_dim; ++d) keys[d * kTile + t] = rows[t * stride + d];
  }
  for (; t < kTile; ++t) {
    for (int d = 0; d < head_dim; ++d) keys[d * kTile + t] = 0.0f;
  }
}

// ---- attention of a unit

// Up to this many panels dequantise a tile's codes each for itself, in registers: that takes no longer than writing the
// tile to a buffer, which may not fit into the first-level cache, and reading it again. Both give the same bits.
constexpr int kDirectPanels = 4;

struct Tile {
  int tokens;
  int64_t first;           // index of its first token in the source
  const int8_t* codes;     // keys as codes, or null: keys in floats
  const float* scales;     // [D] of the codes' channels
  const float* keys;       // [D][64]
  float factor;            // on the scores
  const uint8_t* packed;   // values as codes, or null: values in floats
  const float* norms;      // [64] scales of packed values, or null
  const float* levels;
  const float* values;
  int64_t value_stride;
};

template <int MR>
static void panel(const Tile& tile, const float* q, int head_dim, const int64_t* first, const int64_t* last, float* acc,
                  float* max_, float* sums, Scratch& s) {
  float* p = s.p;
  if (tile.codes == nullptr) {
    scores<MR>(q, FloatKeys{tile.keys}, head_dim, tile.tokens, tile.factor, p);
  } else {
    scores<MR>(q, CodeKeys{tile.codes, tile.scales, static_cast<int64_t>(head_dim) * kTile}, head_dim, tile.tokens, tile.factor, p);
  }
  float correction[MR];
  for (int r = 0; r < MR; ++r) {
    int64_t lo = first[r] - tile.first, hi = last[r] - tile.first;
    lo = lo < 0 ? 0 : lo > tile.tokens ? tile.tokens : lo;
    hi = hi > tile.tokens ? tile.tokens : hi < lo ? lo : hi;
    const int from = static_cast<int>(lo), to = static_cast<int>(hi);
    float* row = p + r * kTile;
    correction[r] = from == 0 && to == kTile
                        ? online_softmax<true>(row, 0, kTile, kTile, tile.norms, max_ + r, sums + r * kWidth)
                        : online_softmax<false>(row, from, to, tile.tokens, tile.norms, max_ + r, sums + r * kWidth);
  }
  if (tile.packed == nullptr) {
    add_values<MR>(p, correction, FloatValues{tile.values, tile.value_stride}, tile.tokens, head_dim, acc);
  } else {
    add_values<MR>(p, correction, CodeValues(tile.packed, head_dim, tile.levels), tile.tokens, head_dim, acc);
  }
}

static void attend(const Unit& unit, Scratch& s) {
  const Group& group = *unit.group;
  const Source& source = unit.source;
  const Visibility& visibility = unit.visibility;
  const int rows = group.rows, head_dim = group.head_dim;
  int64_t earliest = INT64_MAX, latest = 0;
  for (int r = 0; r < rows; ++r) {
    const int64_t request_row = (group.first_row + r) / group.heads;
    const int64_t head = (group.first_row + r) % group.heads;
    int64_t last = source.num_tokens, first = 0;
    if (visibility.causal_last >= 0) last = visibility.causal_last + request_row;
    if (visibility.window > 0) first = last - visibility.window;
    if (visibility.first_visible != nullptr) first = visibility.first_visible[request_row] - visibility.offset;
    s.first[r] = first < 0 ? 0 : first;
    s.last[r] = last;
    earliest = s.first[r] < earliest ? s.first[r] : earliest;
    latest = last > latest ? last : latest;
    const float* q = group.q + request_row * group.row_stride + head * head_dim;
    const int panel_rows = rows - r / kPanel * kPanel < kPanel ? rows - r / kPanel * kPanel : kPanel;
    float* packed = s.query + r / kPanel * kPanel * head_dim + r % kPanel;
    for (int d = 0; d < head_dim; ++d) packed[d * panel_rows] = q[d];
    unit.max[r] = -kInf;
    store(s.sums + r * kWidth, all(0.0f));
  }
  for (int i = 0; i < rows * head_dim; ++i) unit.acc[i] = 0.0f;

  const bool direct = rows <= kDirectPanels * kPanel;
  for (int64_t first = unit.first_token; first < unit.last_token; first += kTile) {
    Tile tile{};
    tile.first = first;
    tile.tokens = static_cast<int>(unit.last_token - first < kTile ? unit.last_token - first : kTile);
    if (earliest >= first + tile.tokens || latest <= first) continue;
    tile.factor = group.scale * kLog2E;
    if (source.key_codes != nullptr) {
      const int64_t index = first / kTile;
      const int8_t* codes = source.key_codes + index * head_dim * kTile;
      if (source.key_scales != nullptr) {
        half_to_floats(source.key_scales + index * head_dim, head_dim, s.scales);
      } else {  // one scale for all goes with the scores
        for (int d = 0; d < head_dim; ++d) s.scales[d] = 1.0f;
        tile.factor *= source.key_scale;
      }
      tile.scales = s.scales;
      if (direct) {
        tile.codes = codes;
      } else {
        dequantise_keys(codes, tile.scales, head_dim, s.keys);
        tile.keys = s.keys;
      }
    } else {
      transpose_keys(source, first, tile.tokens, head_dim, s.values, s.keys);
      tile.keys = s.keys;
    }
    if (source.value_codes != nullptr) {
      const uint8_t* codes = source.value_codes + first * (3 * head_dim / 8);
      int t = 0;
      for (; t + kWidth <= tile.tokens; t += kWidth) store(s.norms + t, load_half(source.value_scales + first + t));
      for (; t < tile.tokens; ++t) s.norms[t] = half_to_float(source.value_scales[first + t]);
      for (; t < kTile; ++t) s.norms[t] = 0.0f;
      tile.norms = s.norms;
      tile.levels = source.levels;
      if (direct) {
        tile.packed = codes;
      } else {
        dequantise_values(CodeValues(codes, head_dim, source.levels), tile.tokens, head_dim, s.values);
        tile.values = s.values;
        tile.value_stride = head_dim;
      }
    } else if (source.dtype == kFloat32) {
      tile.values = static_cast<const float*>(source.dense_values) + first * source.value_stride;
      tile.value_stride = source.value_stride;
    } else {
      to_floats(source.dense_values, first * source.value_stride, source.value_stride, source.dtype, tile.tokens,
                head_dim, s.values);
      tile.values = s.values;
      tile.value_stride = head_dim;
    }
    for (int r = 0; r < rows; r += kPanel) {
      const int panel_rows = rows - r < kPanel ? rows - r : kPanel;
      bool sees = false;
      for (int i = r; i < r + panel_rows; ++i) sees |= s.first[i] < first + tile.tokens && s.last[i] > first;
      if (!sees) continue;
      const float* q = s.query + r * head_dim;
      float* acc = unit.acc + r * head_dim;
      switch (panel_rows) {
#define POLYKV_PANEL(MR)                                                                                      \
  case MR:                                                                                                    \
    panel<MR>(tile, q, head_dim, s.first + r, s.last + r, acc, unit.max + r, s.sums + r * kWidth, s);                \
    break;
        POLYKV_PANEL(1)
        POLYKV_PANEL(2)
        POLYKV_PANEL(3)
        POLYKV_PANEL(4)
        POLYKV_PANEL(5)
        POLYKV_PANEL(6)
#if defined(POLYKV_AVX512)
        POLYKV_PANEL(7)
        POLYKV_PANEL(8)
        POLYKV_PANEL(9)
        POLYKV_PANEL(10)
        POLYKV_PANEL(11)
        POLYKV_PANEL(12)
#endif
#undef POLYKV_PANEL
      }
    }
  }
  for (int r = 0; r < rows; ++r) unit.sum[r] = sum_lanes(load(s.sums + r * kWidth));
}

// ---- rotation

// Walsh-Hadamard transform in blocks, without the factor 1 / sqrt(block).
static void hadamard(float* x, int head_dim, int block) {
  int h = 1;
#if defined(POLYKV_AVX512) || defined(POLYKV_AVX2)
  // partners that share a vector: x[i ^ h] + x[i], or x[i ^ h] - x[i] in the upper of the two lanes
  for (; h < kWidth && h < block; h *= 2) {
    for (int i = 0; i < head_dim; i += kWidth) store(x + i, butterfly(load(x + i), h));
  }
#endif
  for (; h < block; h *= 2) {
    for (int i = 0; i < head_dim; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
    }
  }
}

// ---- joining partial results

static void join(const Group& group, Scratch& s) {
  const int head_dim = group.head_dim;
  for (int r = 0; r < group.rows; ++r) {
    const int64_t request_row = (group.first_row + r) / group.heads;
    const int64_t head = (group.first_row + r) % group.heads;
    float* out = group.out + request_row * group.row_stride + head * head_dim;
    float max_ = -kInf;
    for (int u = 0; u < group.num_units; ++u) max_ = group.units[u].max[r] > max_ ? group.units[u].max[r] : max_;
    const float base = max_ == -kInf ? 0.0f : max_;
    float sum = 0.0f;
    bool rotated = false;
    for (int d = 0; d < head_dim; ++d) out[d] = s.row[d] = 0.0f;
    for (int u = 0; u < group.num_units; ++u) {
      const Unit& unit = group.units[u];
      const float w = power_of_two_of(unit.max[r] - base);
      sum += w * unit.sum[r];
      const float* acc = unit.acc + static_cast<int64_t>(r) * head_dim;
      const bool packed = unit.source.value_codes != nullptr;
      float* to = packed ? s.row : out;
      rotated |= packed;
      for (int d = 0; d < head_dim; d += kWidth) store(to + d, fma(all(w), load(acc + d), load(to + d)));
    }
    if (rotated) {
      hadamard(s.row, head_dim, group.hadamard_block);
      const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(group.hadamard_block));
      if (group.signs != nullptr) {
        for (int d = 0; d < head_dim; ++d) out[d] += s.row[d] * (factor * group.signs[d]);
      } else {
        for (int d = 0; d < head_dim; ++d) out[d] += s.row[d] * factor;
      }
    }
    float* lse = group.lse + request_row * group.lse_stride + head;
    if (sum == 0.0f) {  // and not !(sum > 0): a NaN must stay visible
      for (int d = 0; d < head_dim; ++d) out[d] = 0.0f;
      *lse = -kInf;
      continue;
    }
    for (int d = 0; d < head_dim; ++d) out[d] /= sum;
    *lse = max_ * kLn2 + __builtin_logf(sum);
  }
}

static void merge(const float* const* outs, const float* const* lses, int num_states, int64_t first_row,
                  int64_t last_row, int64_t dim, float* out, float* lse) {
  for (int64_t row = first_row; row < last_row; ++row) {
    float max_ = -kInf;
    for (int i = 0; i < num_states; ++i) max_ = lses[i][row] > max_ ? lses[i][row] : max_;
    const float base = max_ == -kInf ? 0.0f : max_;
    // weights that are divided by their own sum stay exact where exp(lse - total) would round with the size of lse
    float total = 0.0f;
    for (int i = 0; i < num_states; ++i) total += power_of_two_of((lses[i][row] - base) * kLog2E);
    float* to = out + row * dim;
    if (total == 0.0f) {
      for (int64_t d = 0; d < dim; ++d) to[d] = 0.0f;
      lse[row] = -kInf;
      continue;
    }
    const float first_weight = power_of_two_of((lses[0][row] - base) * kLog2E);  // before lse[row] may be overwritten
    const float* from = outs[0] + row * dim;
    for (int64_t d = 0; d < dim; ++d) to[d] = first_weight * from[d];
    for (int i = 1; i < num_states; ++i) {
      const float w = power_of_two_of((lses[i][row] - base) * kLog2E);
      from = outs[i] + row * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] += w * from[d];
    }
    for (int64_t d = 0; d < dim; ++d) to[d] /= total;
    lse[row] = max_ + __builtin_logf(total);
  }
}

// ---- encoding

static float largest(const void* data, int64_t stride, int32_t dtype, int64_t tokens, int head_dim) {
  float m = 0.0f;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int d = 0; d < head_dim; ++d) {
      const float x = __builtin_fabsf(element(data, t * stride + d, dtype));
      m = x > m ? x : m;
    }
  }
  return m;
}

// step > 0 or scales null: that step for every channel; else a step for each channel, to scales. Returns the largest.
static float encode_key_tile(const void* keys, int64_t stride, int32_t dtype, int tokens, int head_dim, float step,
                             int8_t* codes, uint16_t* scales, Scratch& s) {
  to_floats(keys, 0, stride, dtype, tokens, head_dim, s.values);
  float most = 0.0f;
  for (int d = 0; d < head_dim; ++d) s.scales[d] = step;
  if (scales != nullptr) {
    for (int d = 0; d < head_dim; ++d) s.row[d] = 0.0f;
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < head_dim; ++d) {
        const float x = __builtin_fabsf(s.values[t * head_dim + d]);
        s.row[d] = x > s.row[d] ? x : s.row[d];
      }
    }
    for (int d = 0; d < head_dim; ++d) {
      scales[d] = float_to_half_not_below(s.row[d] / 127.0f);
      s.scales[d] = half_to_float(scales[d]);
      most = s.scales[d] > most ? s.scales[d] : most;
    }
  }
  constexpr float kRound = 12582912.0f;  // adding 1.5 * 2^23 and taking it away rounds to the nearest even integer
  for (int d = 0; d < head_dim; ++d) {
    const float scale = s.scales[d];
    for (int t = 0; t < tokens; ++t) {
      float x = scale > 0.0f ? s.values[t * head_dim + d] / scale : 0.0f;
      x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
      volatile float rounded = x + kRound;  // volatile: no optimisation may see through it
      codes[d * kTile + t] = static_cast<int8_t>(static_cast<int>(rounded - kRound));
    }
    for (int t = tokens; t < kTile; ++t) codes[d * kTile + t] = 0;
  }
  return most;
}

// Returns the scale before its rounding to float16.
static float encode_value(const void* value, int32_t dtype, int head_dim, const float* signs, int block,
                          const float* levels, bool least_squares, uint8_t* codes, uint16_t* scale, Scratch& s) {
  float* z = s.row;
  double squares = 0.0;
  for (int d = 0; d < head_dim; ++d) {
    const float x = element(value, d, dtype);
    squares += static_cast<double>(x) * x;
    z[d] = signs == nullptr ? x : x * signs[d];
  }
  const float rms = static_cast<float>(__builtin_sqrt(squares / head_dim));
  hadamard(z, head_dim, block);
  // in double: the inverse of a denormal norm would be infinite
  const double factor = rms > 0.0f ? 1.0 / (__builtin_sqrt(static_cast<double>(block)) * rms) : 0.0;
  double product = 0.0, energy = 0.0;
  uint32_t word = 0;
  for (int d = 0; d < head_dim; ++d) {
    const float x = static_cast<float>(z[d] * factor);
    uint32_t code = 0;
    for (int i = 0; i < 7; ++i) code += x > (levels[i] + levels[i + 1]) * 0.5f;
    product += static_cast<double>(x) * levels[code];
    energy += static_cast<double>(levels[code]) * levels[code];
    word |= code << (3 * (d % 8));
    if (d % 8 == 7) {
      uint8_t* group = codes + d / 8 * 3;
      group[0] = static_cast<uint8_t>(word);
      group[1] = static_cast<uint8_t>(word >> 8);
      group[2] = static_cast<uint8_t>(word >> 16);
      word = 0;
    }
  }
  // argmin_a |z - a * levels|: costs nothing at decode, since it is folded into the stored scale
  const float exact = least_squares ? static_cast<float>(rms * (product / energy)) : rms;
  *scale = float_to_half(exact);
  return exact;
}

// ---- linear layers
//
// Weights are read as torch keeps them, [outputs, inputs], so the vectors' lanes are inputs: a tile of up to kLinearRows rows
// and four outputs is accumulated in registers, and each accumulator's lanes are added up at the end, four accumulators at
// once. A block of at most kMaxInputs inputs is summed in one go, and the blocks' sums are added. Which products are added in
// which order depends on the number of inputs alone.

#if defined(POLYKV_AVX512)

constexpr int kLinearRows = 6;  // 24 of 32 registers accumulate
using v4 = __m128;

// Sums of the lanes of each of four vectors.
POLYKV_INLINE v4 sum_four(vf a, vf b, vf c, vf d) {
  const vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const vf x = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}
POLYKV_INLINE vf load_first(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}

#elif defined(POLYKV_AVX2)

constexpr int kLinearRows = 3;  // 12 of 16
using v4 = __m128;

POLYKV_INLINE v4 sum_four(vf a, vf b, vf c, vf d) {
  const vf ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const vf cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const vf x = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

#elif defined(POLYKV_NEON)

constexpr int kLinearRows = 6;  // 24 of 32
using v4 = vf;

POLYKV_INLINE v4 sum_four(vf a, vf b, vf c, vf d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }

#else

constexpr int kLinearRows = 3;
using v4 = vf;

POLYKV_INLINE v4 sum_four(vf a, vf b, vf c, vf d) { return v4{sum_lanes(a), sum_lanes(b), sum_lanes(c), sum_lanes(d)}; }

#endif

#if defined(POLYKV_AVX512) || defined(POLYKV_AVX2)
POLYKV_INLINE v4 load4(const float* p) { return _mm_loadu_ps(p); }
POLYKV_INLINE void store4(float* p, v4 x) { _mm_storeu_ps(p, x); }
POLYKV_INLINE v4 add4(v4 a, v4 b) { return _mm_add_ps(a, b); }
#else
POLYKV_INLINE v4 load4(const float* p) { return load(p); }
POLYKV_INLINE void store4(float* p, v4 x) { store(p, x); }
POLYKV_INLINE v4 add4(v4 a, v4 b) { return add(a, b); }
#endif

// The first n of a vector's numbers, the others 0; nothing past them is read.
#if !defined(POLYKV_AVX512)
POLYKV_INLINE vf load_first(const float* p, int n) {
  float x[kWidth] = {};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return load(x);
}
#endif

// One output's weights.
struct FloatWeights {
  const float* p;
  POLYKV_INLINE vf get(const FloatWeights& w, int k) { return load(w.p + k); }
  POLYKV_INLINE vf get_first(const FloatWeights& w, int k, int n) { return load_first(w.p + k, n); }
};

template <bool kBfloat>
struct HalfWeights {
  const uint16_t* p;
  POLYKV_INLINE vf get(const HalfWeights& w, int k) { return kBfloat ? load_bfloat(w.p + k) : load_half(w.p + k); }
  POLYKV_INLINE vf get_first(const HalfWeights& w, int k, int n) {
    uint16_t x[kWidth] = {};
    for (int i = 0; i < n; ++i) x[i] = w.p[k + i];
    return get(HalfWeights{x}, 0);
  }
};

struct CodeWeights {
  const int8_t* p;
  const float* scales;
  POLYKV_INLINE vf get(const CodeWeights& w, int k) { return mul(load_int8(w.p + k), all(w.scales[k / kScaleInputs])); }
  POLYKV_INLINE vf get_first(const CodeWeights& w, int k, int n) {
    int8_t x[kWidth] = {};
    for (int i = 0; i < n; ++i) x[i] = w.p[k + i];
    return mul(load_int8(x), all(w.scales[k / kScaleInputs]));
  }
};

template <class Weights>
constexpr bool kWidens = sizeof *Weights{}.p < sizeof(float);

// From where a block of inputs begins (a multiple of 64).
POLYKV_INLINE FloatWeights weights_at(const FloatWeights*, const Linear& a, int64_t output, int64_t input) {
  return FloatWeights{static_cast<const float*>(a.weight) + output * a.weight_stride + input};
}
template <bool kBfloat>
POLYKV_INLINE HalfWeights<kBfloat> weights_at(const HalfWeights<kBfloat>*, const Linear& a, int64_t output,
                                              int64_t input) {
  return HalfWeights<kBfloat>{static_cast<const uint16_t*>(a.weight) + output * a.weight_stride + input};
}
POLYKV_INLINE CodeWeights weights_at(const CodeWeights*, const Linear& a, int64_t output, int64_t input) {
  return CodeWeights{static_cast<const int8_t*>(a.weight) + output * a.weight_stride + input,
                     a.scales + output * a.scale_stride + input / kScaleInputs};
}

struct Around {  // what a tile needs besides its operands
  const float* bias;   // of the first output, to be added to the sums, or null
  int outputs;         // of the four that exist
  bool first;          // block of inputs: the sums replace y, else they are added to it
  const char* ahead;   // what is asked for meanwhile, four cache lines a vector of inputs,
  int64_t ahead_step;  // and bytes from there to the next vector's
};

// sums [rows][4] go to y or are added to it, and the bias last.
static void put_sums(const float* sums, int rows, const Around& around, float* y, int64_t y_stride) {
  float bias[4] = {};
  if (around.bias != nullptr) {
    for (int j = 0; j < around.outputs; ++j) bias[j] = around.bias[j];
  }
  const v4 b = load4(bias);
  for (int r = 0; r < rows; ++r, sums += 4, y += y_stride) {
    float four[4];
    float* to = around.outputs == 4 ? y : four;
    v4 sum = load4(sums);
    if (!around.first) {
      for (int j = 0; to != y && j < 4; ++j) four[j] = j < around.outputs ? y[j] : 0.0f;
      sum = add4(load4(to), sum);
    }
    if (around.bias != nullptr) sum = add4(sum, b);
    store4(to, sum);
    for (int j = 0; to != y && j < around.outputs; ++j) y[j] = four[j];
  }
}

// y[r][o] (+)= sum_k x[r][k] w[o][k] for MR rows and four outputs.
template <int MR, class Weights>
static void linear_tile(const float* x, int64_t x_stride, const Weights (&w)[4], int inputs, const Around& around, float* y,
                        int64_t y_stride) {
  vf acc[MR][4];
  POLYKV_UNROLL
  for (int r = 0; r < MR; ++r) {
    POLYKV_UNROLL
    for (int j = 0; j < 4; ++j) acc[r][j] = all(0.0f);
  }
  const int whole = inputs / kWidth * kWidth;
  const char* ahead = around.ahead;
  for (int k = 0; k < whole; k += kWidth) {
    vf a[MR];
    POLYKV_UNROLL
    for (int r = 0; r < MR; ++r) a[r] = load(x + r * x_stride + k);
    POLYKV_UNROLL
    for (int r = 0; r < MR; ++r) POLYKV_KEEP(a[r]);
    POLYKV_UNROLL
    for (int j = 0; j < 4; ++j) __builtin_prefetch(ahead + 64 * j, 0, 3);
    ahead += around.ahead_step;
    POLYKV_UNROLL
    for (int j = 0; j < 4; ++j) {
      vf b = Weights::get(w[j], k);
      POLYKV_KEEP(b);
      POLYKV_UNROLL
      for (int r = 0; r < MR; ++r) acc[r][j] = fma(a[r], b, acc[r][j]);
    }
  }
  if (whole < inputs) {
    const int n = inputs - whole;
    vf a[MR];
    POLYKV_UNROLL
    for (int r = 0; r < MR; ++r) a[r] = load_first(x + r * x_stride + whole, n);
    POLYKV_UNROLL
    for (int j = 0; j < 4; ++j) {
      const vf b = Weights::get_first(w[j], whole, n);
      POLYKV_UNROLL
      for (int r = 0; r < MR; ++r) acc[r][j] = fma(a[r], b, acc[r][j]);
    }
  }
  float sums[4 * MR];
  POLYKV_UNROLL
  for (int r = 0; r < MR; ++r) store4(sums + 4 * r, sum_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
  put_sums(sums, MR, around, y, y_stride);
}

template <class Weights>
POLYKV_INLINE void linear_panel(const Linear& a, int64_t row, int rows, const Weights (&w)[4], int64_t input, int inputs,
                                const Around& around, int64_t output) {
  const float* x = a.x + row * a.x_stride + input;
  float* y = a.y + row * a.y_stride + output;
#define POLYKV_ROWS(MR) \
  case MR:              \
    return linear_tile<MR, Weights>(x, a.x_stride, w, inputs, around, y, a.y_stride)
  switch (rows) {
    POLYKV_ROWS(1);
    POLYKV_ROWS(2);
    POLYKV_ROWS(3);
#if defined(POLYKV_AVX512) || defined(POLYKV_NEON)
    POLYKV_ROWS(4);
    POLYKV_ROWS(5);
    POLYKV_ROWS(6);
#endif
  }
#undef POLYKV_ROWS
}

template <class Weights>
POLYKV_INLINE void four_outputs(const Linear& a, int64_t output, int64_t input, Weights (&w)[4]) {
  for (int j = 0; j < 4; ++j) {  // an output that does not exist is computed as the last one, and dropped
    const int64_t o = output + j < a.outputs ? output + j : a.outputs - 1;
    w[j] = weights_at(static_cast<const Weights*>(nullptr), a, o, input);
  }
}

POLYKV_INLINE Around around_of(const Linear& a, int64_t output, int64_t input, int inputs) {
  Around around;
  around.outputs = static_cast<int>(a.outputs - output < 4 ? a.outputs - output : 4);
  around.first = input == 0;
  around.bias = a.bias != nullptr && input + inputs == a.inputs ? a.bias + output : nullptr;
  around.ahead = reinterpret_cast<const char*>(a.x);  // nothing in particular
  around.ahead_step = 0;
  return around;
}

template <class Weights>
static void widen_four(const Weights (&w)[4], int inputs, float* to) {
  for (int j = 0; j < 4; ++j, to += kMaxInputs) {
    const int whole = inputs / kWidth * kWidth;
    for (int k = 0; k < whole; k += kWidth) store(to + k, Weights::get(w[j], k));
    if (whole < inputs) store(to + whole, Weights::get_first(w[j], whole, inputs - whole));
  }
}

// Rows that stay in the cache: four outputs after four outputs, whose weights come from memory. The next four outputs' are
// asked for evenly during the work on these, since the processor's own prefetchers would fetch only while weights are being
// read for the first time.
template <class Weights>
static void linear_few_rows(const Linear& a, int64_t each, float* widened) {
  const int64_t panels = (a.rows + kLinearRows - 1) / kLinearRows;
  const int64_t size = static_cast<int64_t>(sizeof *Weights{}.p), bytes = 4 * a.weight_stride * size;
  const int64_t step = 4 * kWidth * size / panels;
  for (int64_t output = 0; output < a.outputs; output += 4) {
    Weights w[4];
    four_outputs(a, output, 0, w);
    const char* next = reinterpret_cast<const char*>(w[0].p) + bytes;
    for (int64_t input = 0; input < a.inputs; input += each) {
      const int inputs = static_cast<int>(a.inputs - input < each ? a.inputs - input : each);
      Around around = around_of(a, output, input, inputs);
      around.ahead = next + 4 * size * input;
      around.ahead_step = step;
      four_outputs(a, output, input, w);
      FloatWeights floats[4];
      if (widened != nullptr) {
        widen_four(w, inputs, widened);
        for (int j = 0; j < 4; ++j) floats[j] = FloatWeights{widened + j * kMaxInputs};
      }
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t row = a.rows * i / panels;
        const int rows = static_cast<int>(a.rows * (i + 1) / panels - row);
        if (widened != nullptr) {
          linear_panel<FloatWeights>(a, row, rows, floats, input, inputs, around, output);
        } else {
          linear_panel<Weights>(a, row, rows, w, input, inputs, around, output);
        }
        around.ahead += 4 * size * inputs / panels;
      }
    }
  }
}

template <class Weights>
static void widen_all(const Linear& a, int64_t input, int inputs, float* to) {
  for (int64_t output = 0; output < a.outputs; output += 4) {
    Weights w[4];
    four_outputs(a, output, input, w);
    widen_four(w, inputs, to + output * kMaxInputs);
  }
}

// Many rows: the outputs' weights stay in the cache, and a panel of rows with them.
static void linear_many_rows(const Linear& a, int64_t each,
                             void (*widen)(const Linear&, int64_t input, int inputs, float* to), float* widened) {
  const int64_t panels = (a.rows + kLinearRows - 1) / kLinearRows;
  for (int64_t input = 0; input < a.inputs; input += each) {
    const int inputs = static_cast<int>(a.inputs - input < each ? a.inputs - input : each);
    Linear b = a;
    if (widened != nullptr) {
      widen(a, input, inputs, widened);
      b.weight = widened - input;
      b.weight_stride = kMaxInputs;
    }
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t row = a.rows * i / panels;
      const int rows = static_cast<int>(a.rows * (i + 1) / panels - row);
      for (int64_t output = 0; output < a.outputs; output += 4) {
        FloatWeights w[4];
        four_outputs(b, output, input, w);
        linear_panel<FloatWeights>(a, row, rows, w, input, inputs, around_of(a, output, input, inputs), output);
      }
    }
  }
}

template <class Weights>
static bool linear_of(const Linear& a, Scratch& s) {
  const int64_t blocks = (a.inputs + kMaxInputs - 1) / kMaxInputs;
  const int64_t each = ((a.inputs + blocks - 1) / blocks + kScaleInputs - 1) / kScaleInputs * kScaleInputs;
  const bool few = a.rows <= kLinearRows || a.rows * a.inputs <= kFewNumbers;
  const bool widens = kWidens<Weights> && a.rows > kLinearRows;  // several panels share what was widened
  if (widens && !s.memory.reserve(static_cast<size_t>((few ? 4 : (a.outputs + 3) / 4 * 4) * kMaxInputs))) return false;
  float* widened = widens ? s.memory.data : nullptr;
  if (few) {
    linear_few_rows<Weights>(a, each, widened);
  } else {
    linear_many_rows(a, each, widen_all<Weights>, widened);
  }
  return true;
}

static bool linear(const Linear& a, Scratch& s) {
  switch (a.dtype) {
    case kFloat32: return linear_of<FloatWeights>(a, s);
    case kFloat16: return linear_of<HalfWeights<false>>(a, s);
    case kBfloat16: return linear_of<HalfWeights<true>>(a, s);
    default: return linear_of<CodeWeights>(a, s);
  }
}

static const Kernels kernels = {
#if defined(POLYKV_AVX512)
    "avx512",
#elif defined(POLYKV_AVX2)
    "avx2",
#elif defined(POLYKV_NEON)
    "neon",
#else
    "portable",
#endif
    attend, join, merge, encode_key_tile, largest, encode_value, linear, kLinearRows};

#endif  // POLYKV_KERNEL_PASS
