// PTX of Hopper's tensor cores and of their operands. Only code for sm_90a has these instructions.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace ep::ptx {

// Boxes in shared memory have rows of 128 bytes and begin at multiples of 1024 bytes. The 16-byte pieces of a row are
// permuted within every 8 rows, so that tensor cores read them without bank conflicts: CU_TENSOR_MAP_SWIZZLE_128B.

// [thread] Start to load a box of a matrix, or of one of several matrices. `barrier` counts the bytes of the whole box
// as they land; entries beyond the matrix are zeros.
__device__ __forceinline__ void box_load(void* shared, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void box_load(void* shared, const CUtensorMap* map, int column, int row, int matrix,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// [thread] Add four floats to memory that nobody else writes, at a multiple of 16 bytes. Subnormal numbers count as 0,
// there, here and in the sums.
__device__ __forceinline__ void add_to_memory(float* p, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

// [warp group] Take registers from the other warp groups of the block, or give them back. All of its warps call it.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Operands are what PTX calls matrix descriptors: of boxes, from some row on, which is a multiple of 8. The sum runs
// along their rows.

// [thread] Return the part of an operand that depends on its place: 16-byte units of the address. The following entries
// of all rows are kNext32Bytes further.
__device__ __forceinline__ uint32_t operand_place(const void* box) { return (shared_address(box) & 0x3ffff) / 16; }
constexpr uint32_t kNext32Bytes = 32 / 16;

// [thread] Return an operand. kBoxBytes: if the sum runs along its columns, the bytes of each of the boxes that lie
// side by side; otherwise the number is not used.
template <uint32_t kBoxBytes = 16>
__device__ __forceinline__ uint64_t operand(uint32_t place) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1, kNextBox = kBoxBytes / 16;
  return (kSwizzle128 << 62 | kEightRows << 32 | kNextBox << 16) | place;
}

// [thread] Let the compiler keep sums where they are: it may not move them from here on, nor earlier.
template <int kNum>
__device__ __forceinline__ void keep_in_place(float (&sums)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// [warp group] Order earlier accesses to the registers of sums before the products that follow. Nobody may access them
// before products_end. Sums that products are added to are given.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int kNum>
__device__ __forceinline__ void products_begin(float (&sums)[kNum]) {
  keep_in_place(sums);
  products_begin();
}

// [warp group] Wait for all products that were started.
template <int kNum>
__device__ __forceinline__ void products_end(float (&sums)[kNum]) {
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep_in_place(sums);
}

// [warp group] Start sums = a x b^T, or add to the sums: a [64, 32], b [128, 32], both float8 e4m3. The thread of lane
// l in warp w has rows 16 w + l / 4 + {0, 8}: sums[4 j + {0, 1}] are columns 8 j + 2 (l % 4) + {0, 1} of the first one,
// sums[4 j + {2, 3}] those of the second.
__device__ __forceinline__ void multiply_64x128(float (&s)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, add, 1, 1;\n}"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]),
        "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]),
        "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]),
        "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31]), "+f"(s[32]),
        "+f"(s[33]), "+f"(s[34]), "+f"(s[35]), "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]),
        "+f"(s[41]), "+f"(s[42]), "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47]), "+f"(s[48]),
        "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]), "+f"(s[55]), "+f"(s[56]),
        "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]), "+f"(s[61]), "+f"(s[62]), "+f"(s[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// [warp group] Start sums = a x b^T, or add to the sums: a [64, 16], b [256, 16], both bfloat16. Columns of sums are as
// in multiply_64x128. kAlongA, kAlongB: 1 if the sum runs along the columns of the operand's boxes, of 64 entries.
template <int kAlongA, int kAlongB>
__device__ __forceinline__ void multiply_64x256(float (&s)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, add, 1, 1, %131, %132;\n}"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]),
        "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]),
        "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]),
        "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31]), "+f"(s[32]),
        "+f"(s[33]), "+f"(s[34]), "+f"(s[35]), "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]),
        "+f"(s[41]), "+f"(s[42]), "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47]), "+f"(s[48]),
        "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]), "+f"(s[55]), "+f"(s[56]),
        "+f"(s[57]), "+f"(s[58]), "+f"(s[59]), "+f"(s[60]), "+f"(s[61]), "+f"(s[62]), "+f"(s[63]), "+f"(s[64]),
        "+f"(s[65]), "+f"(s[66]), "+f"(s[67]), "+f"(s[68]), "+f"(s[69]), "+f"(s[70]), "+f"(s[71]), "+f"(s[72]),
        "+f"(s[73]), "+f"(s[74]), "+f"(s[75]), "+f"(s[76]), "+f"(s[77]), "+f"(s[78]), "+f"(s[79]), "+f"(s[80]),
        "+f"(s[81]), "+f"(s[82]), "+f"(s[83]), "+f"(s[84]), "+f"(s[85]), "+f"(s[86]), "+f"(s[87]), "+f"(s[88]),
        "+f"(s[89]), "+f"(s[90]), "+f"(s[91]), "+f"(s[92]), "+f"(s[93]), "+f"(s[94]), "+f"(s[95]), "+f"(s[96]),
        "+f"(s[97]), "+f"(s[98]), "+f"(s[99]), "+f"(s[100]), "+f"(s[101]), "+f"(s[102]), "+f"(s[103]), "+f"(s[104]),
        "+f"(s[105]), "+f"(s[106]), "+f"(s[107]), "+f"(s[108]), "+f"(s[109]), "+f"(s[110]), "+f"(s[111]), "+f"(s[112]),
        "+f"(s[113]), "+f"(s[114]), "+f"(s[115]), "+f"(s[116]), "+f"(s[117]), "+f"(s[118]), "+f"(s[119]), "+f"(s[120]),
        "+f"(s[121]), "+f"(s[122]), "+f"(s[123]), "+f"(s[124]), "+f"(s[125]), "+f"(s[126]), "+f"(s[127])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kAlongA), "n"(kAlongB));
}

}  // namespace ep::ptx
