// Runs the kernels of polykv_cpu.cpp without Python: under an emulator of another processor, under sanitizers (each array
// has an allocation of its own, exactly as long as it is) and under callgrind.
//
//   kernel_driver isas                          names of the instruction sets, best first
//   kernel_driver run CASES RESULTS ISA         computes every case of a file; test_cpu_builds.py writes and reads them
//   kernel_driver bench CASE ISA [REPEATS]      one fixed case; prints seconds a call (median)
//
// A file is a sequence of arrays, each its length in bytes (int64) and its bytes. A case begins with an array of int64
// parameters whose first says the operation.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../../../kernels/polykv_kernels/cpu/polykv_cpu.cpp"

namespace {

struct Array {
  int64_t bytes = 0;
  void* data = nullptr;  // malloc'ed: std::vector would round its capacity up and hide a read past the end

  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free(data); }

  void allocate(int64_t size) {
    free(data);
    bytes = size;
    data = malloc(static_cast<size_t>(size > 0 ? size : 1));
    memset(data, 0x7f, static_cast<size_t>(size));  // what is left unwritten shows
  }

  bool read(FILE* file) {
    int64_t size = 0;
    if (fread(&size, sizeof size, 1, file) != 1) return false;
    allocate(size);
    return fread(data, 1, static_cast<size_t>(size), file) == static_cast<size_t>(size);
  }

  void write(FILE* file) const {
    fwrite(&bytes, sizeof bytes, 1, file);
    fwrite(data, 1, static_cast<size_t>(bytes), file);
  }

  template <class T>
  T* as() {
    return bytes > 0 ? static_cast<T*>(data) : nullptr;
  }
};

enum Operation { kShared = 0, kRagged = 1, kMerge = 2, kEncodeKeys = 3, kEncodeValues = 4, kLinear = 5 };

int32_t run_shared(const int64_t* p, FILE* in, FILE* results) {
  const int64_t rows = p[1], hq = p[2], hkv = p[3], d = p[4], exact_tokens = p[5], packed_tokens = p[7];
  const int64_t tiles = (packed_tokens + 63) / 64;
  Array q, scalars, keys, values, key_codes, key_scales, value_codes, value_scales, levels, signs, first, out, lse;
  for (Array* a : {&q, &scalars, &keys, &values, &key_codes, &key_scales, &value_codes, &value_scales, &levels, &signs,
                   &first}) {
    if (!a->read(in)) return -1;
  }
  PolykvDense dense{keys.data, values.data, exact_tokens * d, d, exact_tokens * d, d, exact_tokens,
                    static_cast<int32_t>(p[6])};
  PolykvPacked packed{};
  packed.key_codes = key_codes.as<int8_t>();
  packed.key_scales = key_scales.as<uint16_t>();
  packed.value_codes = value_codes.as<uint8_t>();
  packed.value_scales = value_scales.as<uint16_t>();
  packed.levels = levels.as<float>();
  packed.signs = signs.as<float>();
  packed.key_head_stride = tiles * d * 64;
  packed.key_scale_head_stride = tiles * d;
  packed.value_head_stride = packed_tokens * 3 * d / 8;
  packed.value_scale_head_stride = packed_tokens;
  packed.num_tokens = packed_tokens;
  packed.key_scale = scalars.as<float>()[1];
  packed.hadamard_block = static_cast<int32_t>(p[8]);
  out.allocate(rows * hq * d * 4);
  lse.allocate(rows * hq * 4);
  const int32_t status = polykv_cpu_shared_attention(
      q.as<float>(), rows, static_cast<int32_t>(hq), static_cast<int32_t>(hkv), static_cast<int32_t>(d),
      scalars.as<float>()[0], exact_tokens > 0 ? &dense : nullptr, packed_tokens > 0 ? &packed : nullptr,
      first.as<int64_t>(), out.as<float>(), lse.as<float>(), static_cast<int32_t>(p[9]), static_cast<int32_t>(p[10]));
  out.write(results);
  lse.write(results);
  return status;
}

int32_t run_ragged(const int64_t* p, FILE* in, FILE* results) {
  const int64_t rows = p[1], hq = p[2], hkv = p[3], d = p[4], n = p[5], window = p[6];
  const int32_t dtype = static_cast<int32_t>(p[7]);
  Array q, scalars, counts, lengths, out, lse;
  for (Array* a : {&q, &scalars, &counts, &lengths}) {
    if (!a->read(in)) return -1;
  }
  std::vector<Array> keys(n), values(n);
  std::vector<PolykvDense> tails(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!keys[i].read(in) || !values[i].read(in)) return -1;
    const int64_t tokens = lengths.as<int64_t>()[i];
    tails[i] = PolykvDense{keys[i].data, values[i].data, tokens * d, d, tokens * d, d, tokens, dtype};
  }
  out.allocate(rows * hq * d * 4);
  lse.allocate(rows * hq * 4);
  const int32_t status = polykv_cpu_ragged_attention(
      q.as<float>(), static_cast<int32_t>(hq), static_cast<int32_t>(hkv), static_cast<int32_t>(d),
      scalars.as<float>()[0], tails.data(), counts.as<int64_t>(), n, window, out.as<float>(), lse.as<float>(),
      static_cast<int32_t>(p[8]), static_cast<int32_t>(p[9]));
  out.write(results);
  lse.write(results);
  return status;
}

int32_t run_merge_case(const int64_t* p, FILE* in, FILE* results) {
  const int64_t n = p[1], rows = p[2], dim = p[3];
  std::vector<Array> outs(n), lses(n);
  std::vector<const float*> out_pointers(n), lse_pointers(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!outs[i].read(in) || !lses[i].read(in)) return -1;
    out_pointers[i] = outs[i].as<float>();
    lse_pointers[i] = lses[i].as<float>();
  }
  Array out, lse;
  out.allocate(rows * dim * 4);
  lse.allocate(rows * 4);
  const int32_t status = polykv_cpu_merge(out_pointers.data(), lse_pointers.data(), static_cast<int32_t>(n), rows, dim,
                                          out.as<float>(), lse.as<float>(), static_cast<int32_t>(p[4]));
  out.write(results);
  lse.write(results);
  return status;
}

int32_t run_encode_keys(const int64_t* p, FILE* in, FILE* results) {
  const int64_t heads = p[1], tokens = p[2], d = p[3], tiles = (tokens + 63) / 64;
  const bool per_tensor = p[5] != 0;
  Array keys, codes, scales;
  if (!keys.read(in)) return -1;
  codes.allocate(heads * tiles * d * 64);
  scales.allocate(per_tensor ? 4 : heads * tiles * d * 2);
  const int32_t status = polykv_cpu_encode_keys(
      keys.data, static_cast<int32_t>(p[4]), tokens * d, d, static_cast<int32_t>(heads), tokens,
      static_cast<int32_t>(d), codes.as<int8_t>(), per_tensor ? nullptr : scales.as<uint16_t>(),
      per_tensor ? scales.as<float>() : nullptr, static_cast<int32_t>(p[6]));
  codes.write(results);
  scales.write(results);
  return status;
}

int32_t run_encode_values(const int64_t* p, FILE* in, FILE* results) {
  const int64_t heads = p[1], tokens = p[2], d = p[3];
  Array values, signs, levels, codes, scales;
  for (Array* a : {&values, &signs, &levels}) {
    if (!a->read(in)) return -1;
  }
  codes.allocate(heads * tokens * 3 * d / 8);
  scales.allocate(heads * tokens * 2);
  const int32_t status = polykv_cpu_encode_values(
      values.data, static_cast<int32_t>(p[4]), tokens * d, d, static_cast<int32_t>(heads), tokens,
      static_cast<int32_t>(d), signs.as<float>(), static_cast<int32_t>(p[5]), levels.as<float>(),
      static_cast<int32_t>(p[6]), codes.as<uint8_t>(), scales.as<uint16_t>(), static_cast<int32_t>(p[7]));
  codes.write(results);
  scales.write(results);
  return status;
}

int32_t run_linear_case(const int64_t* p, FILE* in, FILE* results) {
  const int64_t rows = p[1], outputs = p[2], inputs = p[3];
  Array x, weight, scales, bias, y;
  for (Array* a : {&x, &weight, &scales, &bias}) {
    if (!a->read(in)) return -1;
  }
  y.allocate(rows * outputs * 4);
  const int32_t status =
      polykv_cpu_linear(x.as<float>(), rows, inputs, weight.data, static_cast<int32_t>(p[4]), inputs, scales.as<float>(),
                        (inputs + 63) / 64, bias.as<float>(), outputs, inputs, y.as<float>(), static_cast<int32_t>(p[5]));
  y.write(results);
  return status;
}

int run(const char* cases, const char* results_path) {
  FILE* in = fopen(cases, "rb");
  FILE* results = fopen(results_path, "wb");
  if (in == nullptr || results == nullptr) {
    fprintf(stderr, "cannot open %s or %s\n", cases, results_path);
    return 2;
  }
  int64_t count = 0;
  for (;; ++count) {
    Array parameters;
    if (!parameters.read(in)) break;
    const int64_t* p = parameters.as<int64_t>();
    int32_t status = -1;
    switch (p[0]) {
      case kShared: status = run_shared(p, in, results); break;
      case kRagged: status = run_ragged(p, in, results); break;
      case kMerge: status = run_merge_case(p, in, results); break;
      case kEncodeKeys: status = run_encode_keys(p, in, results); break;
      case kEncodeValues: status = run_encode_values(p, in, results); break;
      case kLinear: status = run_linear_case(p, in, results); break;
    }
    if (status != 0) {
      fprintf(stderr, "case %lld: status %d\n", static_cast<long long>(count), status);
      return 3;
    }
  }
  fclose(in);
  return fclose(results) == 0 ? 0 : 2;
}

// ---- fixed cases: one layer of SmolLM2-135M (3 KV heads, 3 query heads each, head_dim 64) over 1,024 tokens

uint64_t state = 1;

float uniform() {  // the same numbers everywhere
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<float>(state >> 40) / 16777216.0f - 0.5f;
}

double seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

int bench(const std::string& name, int repeats) {
  const int hkv = 3, hq = 9, d = 64;
  const int64_t tokens = 1024, tiles = tokens / 64;
  const int64_t rows = name == "decode-1" ? 1 : name == "decode-4" ? 4 : name == "decode-15" ? 15 : 128;
  const float levels[8] = {-2.152f, -1.344f, -0.756f, -0.245f, 0.245f, 0.756f, 1.344f, 2.152f};
  std::vector<float> kv(hkv * tokens * d), q(rows * hq * d), out(rows * hq * d), lse(rows * hq), signs(d, 1.0f);
  for (float& x : kv) x = 4 * uniform();
  for (float& x : q) x = 4 * uniform();
  std::vector<int8_t> key_codes(kv.size());
  std::vector<uint16_t> key_scales(hkv * tiles * d), value_scales(hkv * tokens);
  std::vector<uint8_t> value_codes(kv.size() * 3 / 8);
  const auto encode_keys = [&] {
    return polykv_cpu_encode_keys(kv.data(), 0, tokens * d, d, hkv, tokens, d, key_codes.data(), key_scales.data(),
                                  nullptr, 1);
  };
  const auto encode_values = [&] {
    return polykv_cpu_encode_values(kv.data(), 0, tokens * d, d, hkv, tokens, d, signs.data(), 64, levels, 1,
                                    value_codes.data(), value_scales.data(), 1);
  };
  const bool encodes = name == "encode-keys" || name == "encode-values";
  if (!encodes && (encode_keys() != 0 || encode_values() != 0)) return 3;
  PolykvPacked packed{};
  packed.key_codes = key_codes.data();
  packed.key_scales = key_scales.data();
  packed.value_codes = value_codes.data();
  packed.value_scales = value_scales.data();
  packed.levels = levels;
  packed.signs = signs.data();
  packed.key_head_stride = tiles * d * 64;
  packed.key_scale_head_stride = tiles * d;
  packed.value_head_stride = tokens * 3 * d / 8;
  packed.value_scale_head_stride = tokens;
  packed.num_tokens = tokens;
  packed.hadamard_block = d;
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds();
    int32_t status;
    if (name == "encode-keys") {
      status = encode_keys();
    } else if (name == "encode-values") {
      status = encode_values();
    } else {
      status = polykv_cpu_shared_attention(q.data(), rows, hq, hkv, d, 0.125f, nullptr, &packed, nullptr, out.data(),
                                           lse.data(), 0, 1);
    }
    if (status != 0) return 3;
    times.push_back(seconds() - start);
  }
  std::sort(times.begin(), times.end());
  printf("%.9f\n", times[times.size() / 2]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "isas") {
    for (int i = 0; polykv_cpu_available_isa(i) != nullptr; ++i) puts(polykv_cpu_available_isa(i));
    return 0;
  }
  const bool runs = command == "run" && argc == 5, benches = command == "bench" && (argc == 4 || argc == 5);
  if (!runs && !benches) {
    fprintf(stderr, "usage: kernel_driver isas | run CASES RESULTS ISA | bench CASE ISA [REPEATS]\n");
    return 2;
  }
  const char* isa = runs ? argv[4] : argv[3];
  if (polykv_cpu_select_isa(isa) != 0) {
    fprintf(stderr, "this processor has no %s\n", isa);
    return 4;
  }
  return runs ? run(argv[2], argv[3]) : bench(argv[2], argc == 5 ? atoi(argv[4]) : 1);
}
