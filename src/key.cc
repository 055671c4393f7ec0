// Keys and anchoring, as in python/attentune/key.py.
#include <attentune/library.h>

#include <map>
#include <sstream>
#include <utility>

namespace attentune {
namespace {

__extension__ typedef unsigned __int128 Wide;
// Beyond it the powers of 3/2 leave 128 bits.
constexpr int64_t kMaxCount = int64_t{1} << 46;

const char* word(bool flag) { return flag ? "yes" : "no"; }

std::string window_text(const Key& key) {
  if (!key.window_left && !key.window_right) return "none";
  auto side = [](const std::optional<int64_t>& value) {
    return value ? std::to_string(*value) : std::string();
  };
  return side(key.window_left) + "/" + side(key.window_right);
}

void parse_window(const std::string& text, Key* key) {
  if (text == "none") return;
  const size_t slash = text.find('/');
  if (slash == std::string::npos) throw CorruptLibrary("A key's window is " + text + ".");
  const std::string left = text.substr(0, slash), right = text.substr(slash + 1);
  if (!left.empty()) key->window_left = std::stoll(left);
  if (!right.empty()) key->window_right = std::stoll(right);
}

}  // namespace

int64_t anchor(int64_t count, const std::string& level) {
  if (count <= 0 || level == "full") return count;
  if (count > kMaxCount) {
    throw InvalidProblem("A count is " + std::to_string(count) + "; it must be at most 2^46.");
  }
  const std::pair<Wide, Wide> base = level == "minimal"     ? std::pair<Wide, Wide>(5, 2)
                                     : level == "extensive" ? std::pair<Wide, Wide>(3, 2)
                                                            : std::pair<Wide, Wide>(2, 1);
  Wide above = 1, below = 1;
  while (above < static_cast<Wide>(count) * below) {
    above *= base.first;
    below *= base.second;
  }
  return static_cast<int64_t>((above + below - 1) / below);
}

bool Key::operator==(const Key& o) const {
  return total_batches == o.total_batches && seq_q == o.seq_q && seq_kv == o.seq_kv &&
         head_dim == o.head_dim && value_dim == o.value_dim && group == o.group &&
         causal == o.causal && softcap == o.softcap && window_left == o.window_left &&
         window_right == o.window_right && dtype == o.dtype && mask == o.mask && bias == o.bias &&
         bias_dtype == o.bias_dtype && alignment == o.alignment && precision == o.precision &&
         layout == o.layout;
}

std::string Key::str() const {
  std::ostringstream text;
  text << "query_dtype " << dtype << ", key_dtype " << dtype << ", value_dtype " << dtype
       << ", out_dtype " << dtype << ", total_batches " << total_batches << ", seq_q " << seq_q
       << ", seq_kv " << seq_kv << ", head_dim " << head_dim << ", value_dim " << value_dim
       << ", group " << group << ", mask " << mask << ", bias " << bias << ", bias_dtype "
       << bias_dtype << ", causal " << word(causal) << ", alignment " << alignment << ", window "
       << window_text(*this) << ", softcap " << word(softcap) << ", precision " << precision
       << ", layout " << layout;
  return text.str();
}

Key Key::parse(const std::string& text) {
  Key key;
  std::istringstream parts(text);
  std::string part;
  std::map<std::string, std::string> values;
  while (std::getline(parts, part, ',')) {
    const size_t begin = part.find_first_not_of(' ');
    const size_t space = part.find(' ', begin);
    if (begin == std::string::npos || space == std::string::npos) {
      throw CorruptLibrary("The key '" + text + "' is not one that attentune wrote.");
    }
    values[part.substr(begin, space - begin)] = part.substr(space + 1);
  }
  auto take = [&](const char* name) -> const std::string& {
    const auto found = values.find(name);
    if (found == values.end()) {
      throw CorruptLibrary("The key '" + text + "' lacks " + name + ".");
    }
    return found->second;
  };
  key.dtype = take("query_dtype");
  key.total_batches = std::stoll(take("total_batches"));
  key.seq_q = std::stoll(take("seq_q"));
  key.seq_kv = std::stoll(take("seq_kv"));
  key.head_dim = std::stoll(take("head_dim"));
  key.value_dim = std::stoll(take("value_dim"));
  key.group = std::stoll(take("group"));
  key.mask = take("mask");
  key.bias = take("bias");
  key.bias_dtype = take("bias_dtype");
  key.causal = take("causal") == "yes";
  key.alignment = take("alignment");
  parse_window(take("window"), &key);
  key.softcap = take("softcap") == "yes";
  key.precision = take("precision");
  key.layout = take("layout");
  return key;
}

}  // namespace attentune
