// The kernel of dispatch with extras (config.h).
#define EP_WITH_EXTRAS
#include "cuda/dispatch/dispatch.cu"
