// The kernel of dispatch for one node (config.h).
#define EP_ONE_NODE
#include "cuda/dispatch/dispatch.cu"
