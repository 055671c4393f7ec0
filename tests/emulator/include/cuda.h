#include "../runtime.h"
