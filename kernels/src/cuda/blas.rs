//! Dense matrix products by cuBLASLt: many rows, stored bf16 or FP8 in 128 x 128 blocks.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::size_of_val;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::device::Device;
use super::memory::Memory;
use super::tensor::Element;
use crate::backend::KernelError;

/// `CUBLAS_OP_T` of `cublasOperation_t`, which the bindings of this library leave out.
const CUBLAS_OP_T: i32 = 1;

/// What the library may use between the parts of one product.
const WORKSPACE: usize = 32 << 20;

/// `batch` products `y = x W^T` or `y = x W`, all row-major: x `[rows, depth]`, y `[rows, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) depth: usize,
    pub(crate) batch: usize,
    pub(crate) operands: Operands,
    /// Whether W is `[width, depth]`; `[depth, width]` otherwise.
    pub(crate) transposed: bool,
    /// Values from one row to the next.
    pub(crate) x_stride: usize,
    pub(crate) y_stride: usize,
    /// Values from one product's operand to the next's.
    pub(crate) x_step: usize,
    pub(crate) w_step: usize,
    pub(crate) y_step: usize,
    pub(crate) result: Element,
}

/// Types of x and W.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operands {
    /// Both bf16.
    Bf16,
    /// Both e4m3: x with a scale for every row and 128 columns (`[depth / 128][rows rounded up to 4]`), W with one for every
    /// 128 x 128 (`[width / 128][depth / 128]`).
    Fp8,
}

/// Where the operands of a product lie. Scales are 0 for bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) x: u64,
    pub(crate) x_scales: u64,
    pub(crate) w: u64,
    pub(crate) w_scales: u64,
    pub(crate) y: u64,
}

impl Product {
    /// One product with operands that follow each other closely.
    pub(crate) fn plain(
        rows: usize,
        width: usize,
        depth: usize,
        operands: Operands,
        result: Element,
    ) -> Self {
        Self {
            rows,
            width,
            depth,
            batch: 1,
            operands,
            transposed: true,
            x_stride: depth,
            y_stride: width,
            x_step: 0,
            w_step: 0,
            y_step: 0,
            result,
        }
    }
}

/// The library, its workspace, and how it computes the products seen so far.
#[derive(Default)]
pub(crate) struct Blas(Mutex<Option<Opened>>);

struct Opened {
    handle: sys::cublasLtHandle_t,
    workspace: Memory,
    plans: HashMap<Product, Plan>,
}

/// How one product is computed.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: handles of the library, used under the mutex of `Blas` alone.
unsafe impl Send for Opened {}

impl Blas {
    /// Queues a product. When the library is missing or refuses it, the device has failed.
    pub(crate) fn multiply(&self, device: &Device, product: &Product, places: &Places) {
        if product.rows == 0 || device.failed() {
            return;
        }
        device.enter();
        // Every change under the lock is one assignment or insertion.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_none() {
            match Opened::new(device) {
                Ok(opened) => *state = Some(opened),
                Err(e) => return device.fail(e),
            }
        }
        let Some(opened) = state.as_mut() else { return };
        let queued = device
            .profile
            .around(product.name(), device.stream(), || opened.multiply(device, product, places));
        if let Err(e) = queued {
            let Product { rows, width, depth, batch, operands, .. } = product;
            device.fail(KernelError::Device {
                device: device.name.clone(),
                message: format!(
                    "cublasLtMatmul, {batch} x [{rows}, {depth}] by [{width}, {depth}] of {operands:?}: {:?}",
                    e.0
                ),
            });
        }
    }
}

impl Product {
    /// For profiles.
    fn name(&self) -> &'static str {
        match (self.operands, self.batch) {
            (Operands::Fp8, _) => "cublaslt_fp8",
            (Operands::Bf16, 1) => "cublaslt_bf16",
            (Operands::Bf16, _) => "cublaslt_bf16_heads",
        }
    }
}

impl Opened {
    fn new(device: &Device) -> Result<Self, KernelError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(KernelError::Device {
                device: device.name.clone(),
                message: "libcublasLt.so.13 is not there: install cuBLAS of CUDA 13, or name its folder in LD_LIBRARY_PATH".into(),
            });
        }
        let handle = result::create_handle().map_err(|e| KernelError::Device {
            device: device.name.clone(),
            message: format!("cublasLtCreate: {:?}", e.0),
        })?;
        let workspace = Memory::own(device, "cuBLASLt's workspace", WORKSPACE)?;
        Ok(Self { handle, workspace, plans: HashMap::new() })
    }

    fn multiply(
        &mut self,
        device: &Device,
        product: &Product,
        places: &Places,
    ) -> Result<(), CublasError> {
        if !self.plans.contains_key(product) {
            let plan = Plan::new(self.handle, product, places)?;
            self.plans.insert(*product, plan);
        }
        let plan = &self.plans[product];
        if product.operands == Operands::Fp8 {
            plan.scales(places)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        // SAFETY: the layouts describe what lies at the places, as the callers say beside their shapes; all of it and the
        // workspace stay alive until work queued later on this stream reuses it.
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&zero).cast(),
                places.w as *const c_void,
                plan.w,
                places.x as *const c_void,
                plan.x,
                places.y as *const c_void,
                plan.y,
                places.y as *mut c_void,
                plan.y,
                &plan.algorithm,
                self.workspace.at(0) as *mut c_void,
                WORKSPACE,
                device.stream().cast(),
            )
        }
    }
}

impl Plan {
    /// The library thinks in columns: y^T `[width, rows]` is W times x^T.
    fn new(
        handle: sys::cublasLtHandle_t,
        product: &Product,
        places: &Places,
    ) -> Result<Self, CublasError> {
        use sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cudaDataType::{CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_32F};
        let Product { width, depth, batch, .. } = *product;
        // The library wants scales of rows in fours; what the added rows hold is not looked at.
        let rows = match product.operands {
            Operands::Fp8 => product.rows.next_multiple_of(4),
            Operands::Bf16 => product.rows,
        };
        let operand = match product.operands {
            Operands::Bf16 => CUDA_R_16BF,
            Operands::Fp8 => CUDA_R_8F_E4M3,
        };
        let found = match product.result {
            Element::F32 => CUDA_R_32F,
            Element::Bf16 => CUDA_R_16BF,
        };
        let layout = |kind, rows, cols, stride, step: usize| {
            let layout =
                result::create_matrix_layout(kind, rows as u64, cols as u64, stride as i64)?;
            if batch > 1 {
                use sys::cublasLtMatrixLayoutAttribute_t as Layout;
                let (count, step) = (batch as i32, step as i64);
                // SAFETY: `layout` was just made; each value has the type of its attribute.
                unsafe {
                    set_layout(layout, Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
                    set_layout(layout, Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step)?;
                }
            }
            Ok::<_, CublasError>(layout)
        };
        let w = match product.transposed {
            true => layout(operand, depth, width, depth, product.w_step)?,
            false => layout(operand, width, depth, width, product.w_step)?,
        };
        let x = layout(operand, depth, rows, product.x_stride, product.x_step)?;
        let y = layout(found, width, rows, product.y_stride, product.y_step)?;
        let description = result::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        if product.transposed {
            let transposed = CUBLAS_OP_T;
            // SAFETY: `description` was just made; the value has the type of the attribute.
            unsafe { set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)? };
        }
        if product.operands == Operands::Fp8 {
            use sys::cublasLtMatmulMatrixScale_t as Scale;
            let (blocks, rows) = (
                Scale::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                Scale::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
            );
            // SAFETY: as above.
            unsafe {
                set(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &blocks)?;
                set(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &rows)?;
            }
        }
        let mut plan =
            Self { description, w, x, y, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } };
        if product.operands == Operands::Fp8 {
            plan.scales(places)?;
        }
        let preference = result::create_matmul_pref()?;
        // SAFETY: everything named here was made above and is not freed; the preference is freed once.
        let chosen = unsafe {
            use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as BYTES;
            let bytes: *const usize = &WORKSPACE;
            result::set_matmul_pref_attribute(preference, BYTES, bytes.cast(), size_of::<usize>())?;
            let chosen =
                result::get_matmul_algo_heuristic(handle, description, w, x, y, y, preference);
            result::destroy_matmul_pref(preference)?;
            chosen?
        };
        plan.algorithm = chosen.algo;
        Ok(plan)
    }

    /// Names the scales of this use of the plan.
    fn scales(&self, places: &Places) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // SAFETY: the description lives as long as the plan; both values are device pointers.
        unsafe {
            set(
                self.description,
                Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                &places.w_scales,
            )?;
            set(self.description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &places.x_scales)
        }
    }
}

/// # Safety
/// `description` is alive and `value` has the type of `attribute`.
unsafe fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), CublasError> {
    let (address, size) = (std::ptr::from_ref(value).cast(), size_of_val(value));
    // SAFETY: the caller's promise.
    unsafe { result::set_matmul_desc_attribute(description, attribute, address, size) }
}

/// # Safety
/// `layout` is alive and `value` has the type of `attribute`.
unsafe fn set_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: &T,
) -> Result<(), CublasError> {
    let (address, size) = (std::ptr::from_ref(value).cast(), size_of_val(value));
    // SAFETY: the caller's promise.
    unsafe { result::set_matrix_layout_attribute(layout, attribute, address, size) }
}
