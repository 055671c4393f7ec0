// Loads an exported library, computes attention with it, and checks the result.
//
//   attentune export --problem 1,4,4,128,128,64,64:float32 --output attention.so
//   attention_app attention.so
#include <attentune/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr int64_t kHeads = 4, kSeq = 100, kDim = 64;

// One query by the formula, in double precision.
double expected(const std::vector<float>& query, const std::vector<float>& key,
                const std::vector<float>& value, int64_t head, int64_t row, int64_t column) {
  std::vector<double> scores(kSeq);
  for (int64_t j = 0; j < kSeq; ++j) {
    for (int64_t d = 0; d < kDim; ++d) {
      scores[j] += double(query[(head * kSeq + row) * kDim + d]) * key[(head * kSeq + j) * kDim + d];
    }
    scores[j] /= std::sqrt(double(kDim));
  }
  const double most = *std::max_element(scores.begin(), scores.end());
  double sum = 0, result = 0;
  for (int64_t j = 0; j < kSeq; ++j) {
    const double weight = std::exp(scores[j] - most);
    sum += weight;
    result += weight * value[(head * kSeq + j) * kDim + column];
  }
  return result / sum;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: attention_app LIBRARY\n";
    return 1;
  }
  try {
    const auto library = attentune::Library::open(argv[1]);
    for (const std::string& key : library.keys()) std::cout << key << "\n";

    std::mt19937 random(0);
    std::normal_distribution<float> normal;
    std::vector<float> data[3];
    int64_t shape[4] = {1, kHeads, kSeq, kDim};
    DLTensor tensors[3]{};
    for (int n = 0; n < 3; ++n) {
      data[n].resize(kHeads * kSeq * kDim);
      std::generate(data[n].begin(), data[n].end(), [&] { return normal(random); });
      tensors[n].data = data[n].data();
      tensors[n].device = {kDLCPU, 0};
      tensors[n].ndim = 4;
      tensors[n].dtype = {kDLFloat, 32, 1};
      tensors[n].shape = shape;  // without strides, the tensor is compact
    }

    const auto out = library.attention(&tensors[0], &tensors[1], &tensors[2]);

    const auto* result = static_cast<const float*>(out->dl_tensor.data);
    double worst = 0;
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t row = 0; row < kSeq; row += 7) {
        const double wanted = expected(data[0], data[1], data[2], head, row, row % kDim);
        const double error = std::abs(result[(head * kSeq + row) * kDim + row % kDim] - wanted);
        worst = error <= worst ? worst : error;  // a NaN becomes the worst
      }
    }
    std::cout << "greatest error " << worst << "\n";
    return worst < 1e-5 ? 0 : 1;
  } catch (const attentune::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
