// What a library holds, as in python/attentune/manifest.py: read and checked before its code is
// loaded, and the rule by which calls find kernels.
#ifndef ATTENTUNE_SRC_MANIFEST_H_
#define ATTENTUNE_SRC_MANIFEST_H_

#include <attentune/library.h>

#include <string>
#include <utility>
#include <vector>

namespace attentune {

struct Choice {
  std::string symbol, variant;
  int64_t fixed_bytes = 0, bytes = 0;
};

struct Entry {
  Key key;
  int64_t scores = 0;
  std::vector<Choice> choices;
};

struct Manifest {
  std::string level, arch;
  std::vector<std::string> cpu_flags;
  std::vector<Entry> entries;

  /*! \brief Read and check a library's file. */
  static Manifest read(const std::string& path);
  /*! \brief Throw unless the code runs on this machine. */
  void check_machine(const std::string& path) const;
  /*! \brief The entry that serves a key and whether it is the key's own; nullptr if none does. */
  std::pair<const Entry*, bool> choose(const Key& key) const;
};

}  // namespace attentune

#endif  // ATTENTUNE_SRC_MANIFEST_H_
