/* The C interface: a call, a key, and errors as texts. */
#include <attentune/library_c.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                  \
  if (!(condition)) {                                                     \
    fprintf(stderr, "%s:%d: %s is false: %s\n", __FILE__, __LINE__, #condition, \
            attentune_last_error());                                      \
    return 1;                                                             \
  }

int main(int argc, char** argv) {
  char path[4096];
  static float query[4 * 128 * 64], out[4 * 128 * 64];
  int64_t shape[4] = {1, 4, 128, 64};
  DLTensor tensor, result;
  AttentuneLibrary* library;
  size_t n;
  CHECK(argc == 2);
  snprintf(path, sizeof path, "%s/attention.so", argv[1]);
  library = attentune_open(path, 1);
  CHECK(library != NULL);
  CHECK(attentune_num_keys(library) == 6);
  CHECK(strstr(attentune_key(library, 0), "head_dim") != NULL);
  CHECK(attentune_key(library, 6) == NULL);
  for (n = 0; n < 4 * 128 * 64; ++n) {
    query[n] = (float)(n % 64) / 64;
    out[n] = NAN;
  }
  memset(&tensor, 0, sizeof tensor);
  tensor.data = query;
  tensor.device.device_type = kDLCPU;
  tensor.ndim = 4;
  tensor.dtype.code = kDLFloat;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape;
  result = tensor;
  result.data = out;
  /* All values are equal, and so is every average of them. */
  CHECK(attentune_attention(library, &tensor, &tensor, &tensor, &result, NULL) == 1);
  for (n = 0; n < 4 * 128 * 64; ++n) CHECK(fabsf(out[n] - query[n]) < 1e-5f);
  CHECK(attentune_attention(library, &tensor, &tensor, &tensor, &tensor, NULL) == 0);
  CHECK(strstr(attentune_last_error(), "out overlaps query") != NULL);
  attentune_close(library);
  CHECK(attentune_open("nowhere.so", 1) == NULL);
  CHECK(strstr(attentune_last_error(), "cannot be read") != NULL);
  printf("ok\n");
  return 0;
}
