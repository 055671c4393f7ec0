// Tensors of a call: what they say, and views and copies that kernels can read.
#ifndef ATTENTUNE_SRC_TENSOR_H_
#define ATTENTUNE_SRC_TENSOR_H_

#include <attentune/library.h>

#include <string>
#include <utility>
#include <vector>

namespace attentune {

/*! \brief A tensor's description with extents and strides of its own. */
class View {
 public:
  /*! \brief Describe a tensor of the caller's. */
  View(const std::string& name, const DLTensor* tensor);

  /*! \brief Name of the element type as NumPy and TVM spell it. */
  std::string dtype() const;
  int rank() const { return static_cast<int>(shape.size()); }
  int64_t elements() const;
  /*! \brief Addresses where its memory begins and ends. */
  std::pair<const char*, const char*> span() const;
  /*! \brief Whether a kernel can read it in place. */
  bool readable(bool unit_innermost) const;
  /*! \brief Have it read in place, or from a compact copy that is kept here. */
  void make_readable(bool unit_innermost);
  /*! \brief Broadcast it from the right, with strides of 0. */
  void broadcast(const std::vector<int64_t>& full);
  /*! \brief DLPack's tensor, valid while this view is neither moved nor changed. */
  DLTensor* tensor();

  std::vector<int64_t> shape, strides;

 private:
  DLTensor tensor_;
  std::vector<char> copy_;
};

/*! \brief A shape as Python writes it. */
std::string tuple_text(const std::vector<int64_t>& shape);
/*! \brief The problem that a call is; throws InvalidProblem where tensors do not fit together. */
Problem describe(const View& query, const View& key, const View& value, const View* mask,
                 const View* bias, const Options& options);
/*! \brief Throw unless a result can go to `out`. */
void check_out(const View& out, const Problem& problem,
               const std::vector<std::pair<std::string, const View*>>& read);
/*! \brief A new tensor. */
TensorPtr allocate(const std::vector<int64_t>& shape, DLDataType dtype);

}  // namespace attentune

#endif  // ATTENTUNE_SRC_TENSOR_H_
