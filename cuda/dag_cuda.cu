// dag_cuda.cu -- the dynamic programme on a GPU, behind the C interface of dag_cpu.cpp.
//
// Pointers are device pointers. Every call launches on `stream` and returns at once: it does not
// allocate, synchronise or read anything back, so it can be captured in a CUDA graph. The caller
// has set the device. Returns 0 or a cudaError_t (dag_cuda_error gives its text). Rows whose counts
// are outside 1..M or 1..L are not read; they get a NaN likelihood and zero gradients.
#include <cuda_runtime.h>

#include "dag_block_gradient.h"
#include "dag_block_sweep.h"
#include "dag_block_viterbi.h"

namespace dag {

extern __shared__ double shared_memory[];

// The context of one GPU thread, as described in dag_block.h.
struct Device {
  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int num_threads() const { return blockDim.x; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() const { __syncwarp(); }
  template <class T>
  __device__ __forceinline__ T from_previous_lane(T x) const {
    return __shfl_up_sync(0xffffffffu, x, 1);
  }
  template <class Real>
  __device__ __forceinline__ Real* shared() const {
    return reinterpret_cast<Real*>(shared_memory);
  }
  __device__ __forceinline__ float exp2(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ __forceinline__ double exp2(double x) const { return ::exp2(x); }
  __device__ __forceinline__ double exp(double x) const { return ::exp(x); }
  __device__ __forceinline__ double log(double x) const { return ::log(x); }
  __device__ __forceinline__ void load4(float* to, const float* from) const {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  __device__ __forceinline__ void load4(double* to, const double* from) const {
    const double2 x = *reinterpret_cast<const double2*>(from);
    const double2 y = *reinterpret_cast<const double2*>(from + 2);
    to[0] = x.x, to[1] = x.y, to[2] = y.x, to[3] = y.y;
  }
};

template <class Real>
__global__ void __launch_bounds__(kScanThreads) scan_kernel(Launch<Real> all) {
  Device c;
  const int nt = all.num_tiles();
  scan_edges(c, all, blockIdx.x / nt, blockIdx.x % nt);
}

template <class Real>
__global__ void __launch_bounds__(kSweepThreads, 1) sweep_kernel(Launch<Real> all) {
  Device c;
  sweep_row(c, all, blockIdx.x / 2, blockIdx.x % 2);
}

template <class Real>
__global__ void __launch_bounds__(kFinishThreads, 2)
    finish_kernel(Launch<Real> all, Real* log_likelihood) {
  Device c;
  finish_row(c, all, blockIdx.x, log_likelihood);
}

template <class Real>
__global__ void __launch_bounds__(kGradientThreads, sizeof(Real) == 4 ? 10 : 4)
    gradient_kernel(Launch<Real> all, const Real* weight, Real* grad_emission,
                    Real* grad_transition) {
  Device c;
  const int num = int(gradient_blocks(all.num_tiles()));
  gradient_job(c, all, blockIdx.x / num, blockIdx.x % num, weight, grad_emission,
               grad_transition);
}

template <class Real>
__global__ void __launch_bounds__(kViterbiThreads, 2)
    viterbi_kernel(Launch<Real> all, int64_t* path, Real* log_score, int32_t* came_from) {
  Device c;
  const int64_t b = blockIdx.x;
  best_path(c, all, b, path + b * all.M, log_score + b, came_from + b * all.M * all.L);
}

// Launches `num_blocks` blocks. CUDA wants more than 48 KiB of shared memory requested explicitly.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads, size_t bytes,
           void* stream, Arguments... arguments) {
  if (num_blocks > 2147483647) return cudaErrorInvalidConfiguration;
  if (bytes > 48 << 10) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) {
      cudaGetLastError();  // cleared: it is reported here, not by the next call
      return error;
    }
  }
  kernel<<<dim3(static_cast<unsigned>(num_blocks)), num_threads, bytes,
           static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}

template <class Real>
int log_likelihood(const Launch<Real>& all, Real* log_likelihood, void* stream) {
  int error = launch(scan_kernel<Real>, all.B * all.num_tiles(), kScanThreads,
                     kScanThreads * sizeof(Real), stream, all);
  if (error) return error;
  error = launch(sweep_kernel<Real>, all.B * 2, kSweepThreads, Shared<Real>::bytes(all.M), stream,
                 all);
  if (error) return error;
  return launch(finish_kernel<Real>, all.B, kFinishThreads, kFinishBytes, stream, all,
                log_likelihood);
}

}  // namespace dag

#define DAG_INTERFACE(Real, name)                                                               \
  extern "C" int dag_cuda_log_likelihood_##name(                                                \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, Real* mantissa,               \
      int32_t* exponent, int32_t* info, Real* log_likelihood, void* stream) {                   \
    return dag::log_likelihood<Real>({emission, transition, num_targets, num_states, B, M, L,   \
                                      mantissa, exponent, info},                                \
                                     log_likelihood, stream);                                   \
  }                                                                                             \
  extern "C" int dag_cuda_gradients_##name(                                                     \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, Real* mantissa,               \
      int32_t* exponent, int32_t* info, const Real* weight, Real* grad_emission,                \
      Real* grad_transition, void* stream) {                                                    \
    const dag::Launch<Real> all{emission, transition, num_targets, num_states, B, M, L,         \
                                mantissa, exponent, info};                                      \
    return dag::launch(dag::gradient_kernel<Real>, B * dag::gradient_blocks(all.num_tiles()),   \
                       dag::kGradientThreads, dag::gradient_bytes<Real>(), stream, all, weight, \
                       grad_emission, grad_transition);                                         \
  }                                                                                             \
  extern "C" int dag_cuda_viterbi_##name(                                                       \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, int64_t* path,                \
      Real* log_score, int32_t* came_from, void* stream) {                                      \
    const dag::Launch<Real> all{emission, transition, num_targets, num_states, B, M, L,         \
                                nullptr, nullptr, nullptr};                                     \
    return dag::launch(dag::viterbi_kernel<Real>, B, dag::kViterbiThreads,                      \
                       dag::viterbi_bytes(L), stream, all, path, log_score, came_from);         \
  }

DAG_INTERFACE(float, float32)
DAG_INTERFACE(double, float64)

extern "C" const char* dag_cuda_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
