// The same key and the same kernel as Python for 10,000 problems, and what choosing costs.
#include <chrono>

#include "common.h"

namespace {

std::optional<int64_t> side(const std::string& word) {
  if (word == "-") return std::nullopt;
  return std::stoll(word);
}

std::optional<std::vector<int64_t>> shape(const std::string& word) {
  if (word == "-") return std::nullopt;
  std::vector<int64_t> result;
  std::istringstream parts(word);
  for (std::string part; std::getline(parts, part, 'x');) result.push_back(std::stoll(part));
  return result;
}

attentune::Problem parse(const std::string& text) {
  std::istringstream words(text);
  attentune::Problem p;
  std::string mask, bias, bias_dtype, left, right;
  bool softcap = false;
  words >> p.batch >> p.q_heads >> p.kv_heads >> p.seq_q >> p.seq_kv >> p.head_dim >> p.value_dim >>
      p.dtype >> mask >> bias >> bias_dtype >> p.is_causal >> p.top_left >> left >> right >>
      softcap >> p.relaxed >> p.layout;
  CHECK(!words.fail());
  p.mask = shape(mask);
  p.bias = shape(bias);
  if (p.bias) p.bias_dtype = bias_dtype;
  p.window_left = side(left);
  p.window_right = side(right);
  if (softcap) p.softcap = 20.0;
  return p;
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  const auto library = attentune::Library::open(folder + "/attention.so", 0,
                                                attentune::OnMiss::kHeuristic, int64_t{1} << 28);
  std::ifstream file(folder + "/choices.txt");
  int total = 0, served = 0;
  for (std::string line; std::getline(file, line); ++total) {
    std::istringstream parts(line);
    std::string text, key, symbol, chosen = "-";
    std::getline(parts, text, '\t');
    std::getline(parts, key, '\t');
    std::getline(parts, symbol, '\t');
    const attentune::Problem problem = parse(text);
    CHECK(library.key_of(problem).str() == key);
    try {
      chosen = library.choose(problem);
    } catch (const attentune::RecordNotFound&) {
    } catch (const attentune::Unsupported&) {
      chosen = "none";
    }
    CHECK(chosen == symbol);
    served += symbol != "-" && symbol != "none";
  }
  CHECK(total == 10000);
  CHECK(served > 1000);
  CHECK(library.steps().count("fallback: memory") == 1);
  attentune::Problem problem;
  problem.q_heads = problem.kv_heads = 4;
  problem.seq_q = problem.seq_kv = 128;
  problem.head_dim = problem.value_dim = 64;
  const auto begin = std::chrono::steady_clock::now();
  constexpr int kTurns = 100000;
  size_t length = 0;
  for (int n = 0; n < kTurns; ++n) length += library.choose(problem).size();
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  CHECK(length > 0);
  std::cout << total << " problems, " << served << " served; a choice takes "
            << spent.count() / kTurns << " us\n";
  return 0;
}
