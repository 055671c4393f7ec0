// Results against the reference, ownership, and every refusal.
#include <algorithm>

#include "common.h"

template <typename Expected, typename Function>
void check_throws(const std::string& part, Function function) {
  try {
    function();
  } catch (const Expected& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    std::cerr << "'" << error.what() << "' does not say '" << part << "'\n";
    std::exit(1);
  }
  std::cerr << "nothing was thrown that says '" << part << "'\n";
  std::exit(1);
}

int main(int, char** argv) {
  using namespace attentune;
  const std::string folder = argv[1];
  const auto open = [&](const char* name) { return Library::open(folder + "/" + name); };
  const Library library = open("attention.so");
  CHECK(library.keys().size() == 6);
  for (const std::string& key : library.keys()) CHECK(Key::parse(key).str() == key);
  for (int n = 0; n < count_calls(folder); ++n) Call(folder, n).check(library);
  CHECK(library.steps().count("miss") == 1);

  // A new tensor, which another framework takes over with its deleter.
  Call call(folder, 0);
  {
    const TensorPtr made = library.attention(call.dl("query"), call.dl("key"), call.dl("value"));
    const float* const expected =
        reinterpret_cast<const float*>(call.arrays.at("expected").bytes.data());
    CHECK(std::abs(static_cast<float*>(made->dl_tensor.data)[0] - expected[0]) < 1e-4f);
  }

  // Two libraries in one process, and one unloaded while the other stays.
  {
    const Library second = open("attention.so");
    Call(folder, 1).check(second);
  }
  Call(folder, 1).check(library);

  check_throws<LibraryNotFound>("cannot be read", [&] { open("none.so"); });
  check_throws<ForeignLibrary>("is not a library that attentune exported", [&] { open("cut.so"); });
  check_throws<ForeignLibrary>("its end was cut off", [&] { open("choices.txt"); });
  check_throws<CorruptLibrary>("checksum", [&] { open("flipped.so"); });
  check_throws<NewerLibrary>("the schema 2", [&] { open("schema.so"); });
  check_throws<UnsupportedMachine>("is for sparc", [&] { open("arch.so"); });
  check_throws<UnsupportedMachine>("needs the CPU features amx9", [&] { open("features.so"); });
  check_throws<CorruptLibrary>("is damaged", [&] { open("nonsense.so"); });
  check_throws<CorruptLibrary>("lacks the kernel", [&] { open("missing.so"); });

  DLTensor* const query = call.dl("query");
  DLTensor* const key = call.dl("key");
  DLTensor* const value = call.dl("value");
  const auto run = [&](const Options& options = {}) {
    return library.attention(query, key, value, options);
  };
  query->device = {kDLCUDA, 0};
  check_throws<UnsupportedArray>("on the device cuda:0", [&] { run(); });
  query->device = {kDLCPU, 0};
  key->dtype = {kDLFloat, 64, 1};
  check_throws<InvalidProblem>("key has the element type float64", [&] { run(); });
  key->dtype = {kDLFloat, 16, 1};
  check_throws<InvalidProblem>("key has the element type float16 and query float32",
                               [&] { run(); });
  key->dtype = {kDLFloat, 32, 1};
  query->ndim = 3;
  check_throws<InvalidProblem>("it must have four axes", [&] { run(); });
  query->ndim = 4;
  Options options;
  options.mask = value;
  check_throws<InvalidProblem>("mask has the element type float32", [&] { run(options); });
  check_throws<InvalidProblem>("out overlaps value",
                               [&] { library.attention(query, key, value, value); });
  check_throws<InvalidProblem>("query is no tensor",
                               [&] { library.attention(nullptr, key, value); });
  Problem unknown;
  unknown.head_dim = 65;
  check_throws<RecordNotFound>("head_dim 65", [&] { library.choose(unknown); });
  const Library strict = Library::open(folder + "/attention.so", 1, OnMiss::kError);
  Call beyond(folder, 6);
  beyond.options.relaxed = true;
  check_throws<RecordNotFound>("precision relaxed", [&] { beyond.check(strict); });

  // A query that lies with its innermost axis apart is copied.
  Array& apart = call.arrays.at("query");
  Array wide = apart;
  wide.bytes.assign(2 * apart.bytes.size(), 0);
  for (size_t n = 0; n < apart.bytes.size() / 4; ++n) {
    std::copy_n(apart.bytes.data() + 4 * n, 4, wide.bytes.data() + 8 * n);
  }
  for (int64_t& stride : wide.strides) stride *= 2;
  apart = wide;
  call.check(library);
  std::cout << "ok\n";
  return 0;
}
