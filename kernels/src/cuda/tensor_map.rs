//! Descriptions of tensors for Hopper's copy engine (TMA), passed to kernels by value as `__grid_constant__`.
#![allow(unsafe_code)]

use std::ptr;

use cudarc::driver::sys;

use super::device::Device;

/// A tensor in device memory, and the box of it that one copy moves. The memory has to stay alive while kernels use it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct TensorMap(sys::CUtensorMap);

/// Type of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapElement {
    /// One byte each: e4m3 codes too.
    U8,
    Bf16,
    F32,
}

/// What a [`TensorMap`] describes, innermost dimension first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<const N: usize> {
    pub(crate) element: MapElement,
    /// Values along each dimension.
    pub(crate) dims: [u64; N],
    /// Bytes from one value to the next along each dimension after the first; only the first `N - 1` count. Multiples of 16.
    pub(crate) strides: [u64; N],
    /// Values of the box along each dimension, at most 256. What lies past a dimension's end is read as zero.
    pub(crate) tile: [u32; N],
    /// The 128-byte swizzle of `hopper.cuh`; the box is 128 bytes wide then.
    pub(crate) swizzled: bool,
}

impl TensorMap {
    /// Describes the tensor at `address` (a multiple of 16). When the driver refuses, the device has failed.
    pub(crate) fn new<const N: usize>(device: &Device, address: u64, tile: Tile<N>) -> Self {
        use sys::CUtensorMapDataType_enum as Type;
        let element = match tile.element {
            MapElement::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            MapElement::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            MapElement::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        let swizzle = match tile.swizzled {
            true => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            false => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        if device.failed() {
            return Self(map);
        }
        device.enter();
        let every = [1_u32; N];
        // SAFETY: the arrays hold N values each, as the rank says, and outlive the call, which only writes `map`.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                ptr::from_mut(&mut map),
                element,
                N as u32,
                address as *mut std::ffi::c_void,
                tile.dims.as_ptr(),
                tile.strides.as_ptr(),
                tile.tile.as_ptr(),
                every.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        device.note(encoded.result());
        Self(map)
    }
}
