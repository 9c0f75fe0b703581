// The kernel of combine with extras (config.h).
#define EP_WITH_EXTRAS
#include "cuda/combine/combine.cu"
