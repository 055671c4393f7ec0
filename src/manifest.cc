#include "manifest.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#ifndef _WIN32
#include <sys/utsname.h>
#endif

namespace attentune {
namespace {

namespace json = tvm::ffi::json;

constexpr int64_t kSchema = 1;
constexpr uint32_t kFormat = 1;
constexpr char kMagic[] = "ATTNLIB\n";
constexpr size_t kFooter = 24;  // format, checksum: 4 bytes each; length: 8; magic: 8

uint32_t crc32(const std::string& bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t n = 0; n < 256; ++n) {
      uint32_t value = n;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0u);
      made[n] = value;
    }
    return made;
  }();
  uint32_t value = 0xFFFFFFFFu;
  for (const char c : bytes) {
    value = table[(value ^ static_cast<unsigned char>(c)) & 0xFF] ^ (value >> 8);
  }
  return ~value;
}

uint64_t little_endian(const char* bytes, int count) {
  uint64_t value = 0;
  for (int n = count; n-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[n]);
  return value;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file) content << file.rdbuf();
  if (!file || !content) {
    throw LibraryNotFound("The library " + path + " cannot be read (" +
                          std::strerror(errno != 0 ? errno : EIO) + "); check the path.");
  }
  return content.str();
}

std::string text_of(const std::string& path) {
  std::string content = read_file(path);
  const size_t size = content.size();
  if (size < kFooter || content.compare(size - 8, 8, kMagic, 8) != 0) {
    throw ForeignLibrary(path +
                         " is not a library that attentune exported, or its end was cut off; "
                         "export it anew and copy it whole, without stripping it.");
  }
  const char* footer = content.data() + size - kFooter;
  const uint32_t format = static_cast<uint32_t>(little_endian(footer, 4));
  const uint32_t checksum = static_cast<uint32_t>(little_endian(footer + 4, 4));
  const uint64_t length = little_endian(footer + 8, 8);
  if (format != kFormat) {
    throw NewerLibrary("The library " + path + " has the format " + std::to_string(format) +
                       ", and this version reads " + std::to_string(kFormat) +
                       "; export it with the version that loads it.");
  }
  content.resize(size - kFooter);
  if (crc32(content) != checksum || length > content.size()) {
    throw CorruptLibrary("The library " + path +
                         " is damaged: its checksum is not that of its contents; export it anew, "
                         "or copy it again.");
  }
  return content.substr(content.size() - length);
}

template <typename T>
T field(const json::Object& object, const char* name) {
  return object.at(tvm::ffi::String(name)).cast<T>();
}

std::string text_field(const json::Object& object, const char* name) {
  return field<tvm::ffi::String>(object, name);
}

Entry read_entry(const json::Object& data, const std::map<std::string, std::string>& variants) {
  Entry entry;
  entry.key = Key::parse(text_field(data, "key"));
  entry.scores = field<int64_t>(data, "scores");
  for (const auto& one : field<json::Array>(data, "kernels")) {
    const auto kernel = one.cast<json::Object>();
    Choice choice;
    choice.symbol = text_field(kernel, "symbol");
    choice.variant = variants.at(choice.symbol);
    choice.fixed_bytes = field<int64_t>(kernel, "fixed_bytes");
    choice.bytes = field<int64_t>(kernel, "bytes");
    entry.choices.push_back(choice);
  }
  return entry;
}

Manifest parse(const std::string& text, const std::string& path) {
  try {
    const auto data = json::Parse(text).cast<json::Object>();
    const int64_t schema = field<int64_t>(data, "schema");
    if (schema != kSchema) {
      throw NewerLibrary("The manifest of " + path + " has the schema " + std::to_string(schema) +
                         ", and this version reads " + std::to_string(kSchema) +
                         "; export the library with the version that loads it.");
    }
    Manifest manifest;
    manifest.level = text_field(data, "level");
    manifest.arch = text_field(data, "arch");
    for (const auto& flag : field<json::Array>(data, "cpu_flags")) {
      manifest.cpu_flags.push_back(flag.cast<tvm::ffi::String>());
    }
    std::map<std::string, std::string> variants;
    for (const auto& one : field<json::Array>(data, "kernels")) {
      const auto kernel = one.cast<json::Object>();
      variants[text_field(kernel, "symbol")] = text_field(kernel, "variant");
    }
    for (const auto& one : field<json::Array>(data, "keys")) {
      manifest.entries.push_back(read_entry(one.cast<json::Object>(), variants));
    }
    return manifest;
  } catch (const NewerLibrary&) {
    throw;
  } catch (const std::exception& error) {
    throw CorruptLibrary("The manifest of " + path + " is damaged (" + error.what() +
                         "); export the library anew.");
  }
}

std::string this_arch() {
#ifndef _WIN32
  utsname name{};
  uname(&name);
  const std::string machine = name.machine;
  return machine == "arm64" ? "aarch64" : machine == "amd64" ? "x86_64" : machine;
#else
  return "x86_64";
#endif
}

std::set<std::string> this_flags() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()};
  }
  return {};
}

int bit_length(int64_t count) {
  int bits = 0;
  for (; count > 0; count >>= 1) ++bits;
  return bits;
}

// Which sides of the scores are bounded: all of a window that a kernel's code knows.
bool lower(const Key& key) { return key.window_left.has_value(); }
bool upper(const Key& key) { return key.causal || key.window_right.has_value(); }

// How far a key is from one that is served, -1 if its kernels are not for it.
int64_t distance(const Key& key, const Key& served) {
  if (key.dtype != served.dtype || key.head_dim != served.head_dim ||
      key.value_dim != served.value_dim || key.group != served.group ||
      key.bias_dtype != served.bias_dtype || key.softcap != served.softcap ||
      key.precision != served.precision || lower(key) != lower(served) ||
      upper(key) != upper(served)) {
    return -1;
  }
  int64_t result = 0;
  for (const auto& [wanted, found] :
       {std::pair(&key.mask, &served.mask), std::pair(&key.bias, &served.bias)}) {
    if (*wanted == *found) continue;
    if (*wanted != "broadcast" || *found != "dense") return -1;
    result += 1000;
  }
  for (const auto& [wanted, found] : {std::pair(key.total_batches, served.total_batches),
                                      std::pair(key.seq_q, served.seq_q),
                                      std::pair(key.seq_kv, served.seq_kv)}) {
    result += std::abs(bit_length(wanted) - bit_length(found));
  }
  return result;
}

}  // namespace

Manifest Manifest::read(const std::string& path) {
  errno = 0;
  const std::string text = text_of(path);
  std::ifstream beside(path + ".json", std::ios::binary);
  if (beside) {
    std::ostringstream other;
    other << beside.rdbuf();
    if (other.str() != text) {
      throw CorruptLibrary(path + ".json is not the manifest of " + path +
                           "; delete it, or export the library anew.");
    }
  }
  return parse(text, path);
}

void Manifest::check_machine(const std::string& path) const {
  const std::string here = this_arch();
  if (arch != here) {
    throw UnsupportedMachine("The library " + path + " is for " + arch + ", and this machine is " +
                             here + "; export one for this machine.");
  }
  const std::set<std::string> flags = this_flags();
  std::vector<std::string> needed = cpu_flags;
  std::sort(needed.begin(), needed.end());
  std::string missing;
  for (const std::string& flag : needed) {
    if (flags.count(flag) == 0) missing += (missing.empty() ? "" : ", ") + flag;
  }
  if (!missing.empty()) {
    throw UnsupportedMachine("The library " + path + " needs the CPU features " + missing +
                             ", which this CPU lacks; export one for this CPU.");
  }
}

std::pair<const Entry*, bool> Manifest::choose(const Key& key) const {
  const Entry* nearest = nullptr;
  int64_t least = 0;
  for (const Entry& entry : entries) {
    if (entry.key == key) return {&entry, true};
    const int64_t found = distance(key, entry.key);
    if (found >= 0 && (nearest == nullptr || found < least)) {
      nearest = &entry;
      least = found;
    }
  }
  return {nearest, false};
}

}  // namespace attentune
