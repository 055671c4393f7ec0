/*!
 * \file attentune/library.h
 * \brief Exported attention libraries, called from C++17.
 *
 * Tensors are DLPack's, `[batch, heads, seq, dim]`, on the CPU, of float32, float16 or bfloat16, with
 * any strides. Every error is an exception whose text says what is wrong, the value and what to do.
 */
#ifndef ATTENTUNE_LIBRARY_H_
#define ATTENTUNE_LIBRARY_H_

#include <dlpack/dlpack.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace attentune {

/*! \brief Base of every error that is raised on purpose. */
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/*! \brief The tensors of a call do not fit together. */
class InvalidProblem : public Error {
  using Error::Error;
};
/*! \brief A tensor is on a device that cannot be used. */
class UnsupportedArray : public Error {
  using Error::Error;
};
/*! \brief A library has no kernel for a call. */
class RecordNotFound : public Error {
  using Error::Error;
};
/*! \brief No kernel has the memory that a call needs. */
class Unsupported : public Error {
  using Error::Error;
};
/*! \brief A library cannot be used. */
class LibraryError : public Error {
  using Error::Error;
};
/*! \brief There is no readable file of a library's name. */
class LibraryNotFound : public LibraryError {
  using LibraryError::LibraryError;
};
/*! \brief A file is not a library of attentune, or its end is missing. */
class ForeignLibrary : public LibraryError {
  using LibraryError::LibraryError;
};
/*! \brief A library is damaged. */
class CorruptLibrary : public LibraryError {
  using LibraryError::LibraryError;
};
/*! \brief A library has a format or schema that this version does not know. */
class NewerLibrary : public LibraryError {
  using LibraryError::LibraryError;
};
/*! \brief A library's code is for another machine. */
class UnsupportedMachine : public LibraryError {
  using LibraryError::LibraryError;
};

/*! \brief Options of a call, with the defaults of `attentune.attention`. */
struct Options {
  /*! \brief Boolean, True where a key takes part; broadcasts from the right. */
  const DLTensor* mask = nullptr;
  /*! \brief Added to the scores; broadcasts likewise. */
  const DLTensor* bias = nullptr;
  bool is_causal = false;
  /*! \brief Whether the diagonal begins at the first key, not ends at the last. */
  bool top_left = false;
  /*! \brief Keys left and right of the diagonal that are visible. */
  std::optional<int64_t> window_left, window_right;
  /*! \brief 1 / sqrt(head_dim) by default. */
  std::optional<double> scale;
  /*! \brief Bound that scores approach. */
  std::optional<double> softcap;
  bool relaxed = false;
};

/*! \brief What is stored under a key, and what a call is anchored to: fields as in Python. */
struct Key {
  std::string dtype;
  int64_t total_batches = 0, seq_q = 0, seq_kv = 0, head_dim = 0, value_dim = 0, group = 1;
  std::string mask = "none", bias = "none", bias_dtype = "none";
  bool causal = false;
  std::string alignment = "none";
  std::optional<int64_t> window_left, window_right;
  bool softcap = false;
  std::string precision = "strict", layout = "bhsd";

  bool operator==(const Key& other) const;
  /*! \brief The canonical text. */
  std::string str() const;
  /*! \brief The key of a canonical text. */
  static Key parse(const std::string& text);
};

/*! \brief One exact call without its tensors. Extents of mask and bias are of rank 4. */
struct Problem {
  int64_t batch = 1, q_heads = 1, kv_heads = 1, seq_q = 1, seq_kv = 1, head_dim = 1, value_dim = 1;
  std::string dtype = "float32";
  std::optional<std::vector<int64_t>> mask, bias;
  std::string bias_dtype = "none";
  bool is_causal = false, top_left = false;
  std::optional<int64_t> window_left, window_right;
  std::optional<double> scale, softcap;
  bool relaxed = false;
  std::string layout = "bhsd";
};

/*! \brief Upper end of the bucket of a count at a level: minimal, balanced, extensive or full. */
int64_t anchor(int64_t count, const std::string& level);

/*! \brief Whether a call whose key is not in the library gets the nearest key's kernel. */
enum class OnMiss { kHeuristic, kError };

/*! \brief A tensor with its own memory, released by its deleter. */
struct TensorDeleter {
  void operator()(DLManagedTensor* tensor) const {
    if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};
using TensorPtr = std::unique_ptr<DLManagedTensor, TensorDeleter>;

/*!
 * \brief An exported library. It may be called from many threads at once, and copied cheaply; its
 *  code is unloaded with the last copy.
 */
class Library {
 public:
  /*!
   * \brief Load a library, after checking its file from beginning to end.
   * \param path The file that attentune exported.
   * \param threads Threads of a call; this machine's cores if 0.
   * \param on_miss What a call does whose key the library lacks.
   * \param memory_bytes What a kernel may take as workspace; a share of the free memory by default.
   */
  static Library open(const std::string& path, int threads = 0,
                      OnMiss on_miss = OnMiss::kHeuristic,
                      std::optional<int64_t> memory_bytes = std::nullopt);

  /*! \brief Canonical texts of the keys. */
  std::vector<std::string> keys() const;
  /*! \brief Compute attention into a new tensor `[batch, q_heads, seq_q, value_dim]`. */
  TensorPtr attention(const DLTensor* query, const DLTensor* key, const DLTensor* value,
                      const Options& options = {}) const;
  /*! \brief Compute attention into a tensor of the caller's, which overlaps none that is read. */
  void attention(const DLTensor* query, const DLTensor* key, const DLTensor* value, DLTensor* out,
                 const Options& options = {}) const;
  /*! \brief Key of a problem, at the level of this library's keys. */
  Key key_of(const Problem& problem) const;
  /*! \brief Name of the function that serves a problem; throws what a call throws. */
  std::string choose(const Problem& problem) const;
  /*! \brief How often a choice was not the key's first kernel, by reason. */
  std::map<std::string, int64_t> steps() const;

 private:
  struct State;
  explicit Library(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace attentune

#endif  // ATTENTUNE_LIBRARY_H_
