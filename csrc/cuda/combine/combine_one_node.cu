// The kernel of combine for one node (config.h).
#define EP_ONE_NODE
#include "cuda/combine/combine.cu"
