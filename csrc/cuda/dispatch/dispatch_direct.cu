// The kernel of dispatches that make a direct plan (config.h).
#define EP_DIRECT
#include "cuda/dispatch/dispatch.cu"
