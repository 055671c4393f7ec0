/*!
 * \file attentune/library_c.h
 * \brief Exported attention libraries for C, and for languages that call C.
 *
 * Functions return 0, or NULL for pointers, after an error; `attentune_last_error` then has its text.
 */
#ifndef ATTENTUNE_LIBRARY_C_H_
#define ATTENTUNE_LIBRARY_C_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct AttentuneLibrary AttentuneLibrary;

/*! \brief Options of a call. Zero all of it for the defaults. */
typedef struct {
  const DLTensor* mask; /*!< NULL for none. */
  const DLTensor* bias; /*!< NULL for none. */
  int is_causal;
  int top_left;
  int has_window_left, has_window_right;
  int64_t window_left, window_right;
  int has_scale;
  double scale;
  double softcap; /*!< 0 for none. */
  int relaxed;
} AttentuneOptions;

/*! \brief Load a library; `threads` 0 takes this machine's cores. */
AttentuneLibrary* attentune_open(const char* path, int threads);
/*! \brief Unload it. */
void attentune_close(AttentuneLibrary* library);
/*! \brief Number of keys. */
size_t attentune_num_keys(const AttentuneLibrary* library);
/*! \brief Canonical text of a key, valid until the library is closed. */
const char* attentune_key(const AttentuneLibrary* library, size_t index);
/*! \brief Compute attention into `out`; 1 if it did. `options` may be NULL. */
int attentune_attention(const AttentuneLibrary* library, const DLTensor* query, const DLTensor* key,
                        const DLTensor* value, DLTensor* out, const AttentuneOptions* options);
/*! \brief Text of this thread's last error. */
const char* attentune_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* ATTENTUNE_LIBRARY_C_H_ */
