//! One GPU: its context, its stream, its kernels and its memory.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::arena::Arena;
use super::blas::Blas;
use super::cubins::CUBINS;
use super::memory::Memory;
use super::profile::Profile;
use super::upload::{self, Upload};
use crate::backend::KernelError;

/// A GPU and the one stream that every operation of a backend runs on.
pub(crate) struct Device {
    pub(crate) name: String,
    /// Hex digits of the GPU's identity, the same in every process.
    pub(crate) uuid: String,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Every kernel by its name.
    functions: HashMap<String, Kernel>,
    arena: Mutex<Arc<Arena>>,
    upload: Mutex<Upload>,
    pub(crate) blas: Blas,
    pub(crate) profile: Profile,
    /// The first failure of an operation; what follows it does nothing.
    failure: Mutex<Option<KernelError>>,
}

/// Shared memory that every kernel may ask for, and the most that Hopper gives to one that is allowed to.
const USUAL_SHARED: usize = 48 << 10;
const LARGEST_SHARED: i32 = 227 << 10;

/// A kernel of a loaded module.
struct Kernel {
    function: sys::CUfunction,
    /// Whether it may use [`LARGEST_SHARED`].
    raised: OnceLock<Result<(), DriverError>>,
}

/// All kernels of a module.
fn kernels(module: sys::CUmodule) -> Result<Vec<(String, Kernel)>, DriverError> {
    let mut count = 0;
    // SAFETY: the driver writes one number.
    unsafe { sys::cuModuleGetFunctionCount(&mut count, module) }.result()?;
    let mut functions = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: the list has room for `count` handles.
    unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }.result()?;
    let named = functions.into_iter().map(|function| {
        let mut name = std::ptr::null();
        // SAFETY: the driver gives a string that lives as long as the module, which is never unloaded.
        let name = unsafe {
            sys::cuFuncGetName(&mut name, function).result()?;
            CStr::from_ptr(name)
        };
        Ok((name.to_string_lossy().into_owned(), Kernel { function, raised: OnceLock::new() }))
    });
    named.collect()
}

// SAFETY: CUDA contexts, streams, modules and functions may be used from any thread; every use makes the context current
// first.
unsafe impl Send for Device {}
// SAFETY: as above; what changes after the start is behind a mutex.
unsafe impl Sync for Device {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is one assignment or insertion, so a panicked holder left a whole value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What can stand in a kernel's argument list.
pub(crate) trait Argument: Copy {}
impl Argument for i32 {}
impl Argument for u32 {}
impl Argument for i64 {}
impl Argument for u64 {}
impl Argument for f32 {}
impl Argument for super::weight::Matrix {}
impl Argument for super::tensor_map::TensorMap {}

/// The address of an argument, as the driver wants it.
pub(crate) fn argument<T: Argument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Launches a kernel: `launch!(device, "name", grid, block, shared; arguments)`. Pointers are passed as the `u64` of
/// [`Memory::at`].
macro_rules! launch {
    ($device:expr, $name:expr, $grid:expr, $block:expr, $shared:expr; $($argument:expr),* $(,)?) => {
        $device.launch($name, $grid.into(), $block, $shared, &mut [$($crate::cuda::device::argument(&$argument)),*])
    };
}
pub(crate) use launch;

/// Blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid(pub(crate) usize, pub(crate) usize, pub(crate) usize);

impl From<usize> for Grid {
    fn from(x: usize) -> Self {
        Self(x, 1, 1)
    }
}

impl From<(usize, usize)> for Grid {
    fn from((x, y): (usize, usize)) -> Self {
        Self(x, y, 1)
    }
}

impl From<(usize, usize, usize)> for Grid {
    fn from((x, y, z): (usize, usize, usize)) -> Self {
        Self(x, y, z)
    }
}

/// GPUs that the driver shows.
pub(crate) fn count() -> Result<usize, KernelError> {
    let said = |message: String| KernelError::Device { device: "cuda".into(), message };
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(said(NO_DRIVER.into()));
    }
    result::init().map_err(|e| said(describe(e)))?;
    let count = result::device::get_count().map_err(|e| said(describe(e)))?;
    Ok(count as usize)
}

const NO_DRIVER: &str = "libcuda.so.1 is not there: this machine has no NVIDIA driver";

impl Device {
    /// Opens a GPU and loads the kernels.
    ///
    /// # Errors
    /// When there is no driver, no such GPU, or no kernel for its architecture.
    pub(crate) fn open(ordinal: usize, workspace: u64) -> Result<Arc<Self>, KernelError> {
        let missing = |message: &str| KernelError::Device {
            device: format!("cuda:{ordinal}"),
            message: message.to_owned(),
        };
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing("libcuda.so.1 is not there: this machine has no NVIDIA driver"));
        }
        let said = |e: DriverError| missing(&describe(e));
        result::init().map_err(said)?;
        let count = count()?;
        if ordinal >= count {
            return Err(missing(&format!("there are {count} GPUs, numbered from 0")));
        }
        let device = result::device::get(ordinal as i32).map_err(said)?;
        let name = result::device::get_name(device).map_err(said)?;
        let uuid = result::device::get_uuid(device).map_err(said)?;
        use sys::CUdevice_attribute_enum as Attribute;
        // SAFETY: `device` is the handle that the driver gave.
        let attribute =
            |which| unsafe { result::device::get_attribute(device, which) }.map_err(said);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let architecture = format!("{major}{minor}a");
        let images: Vec<_> = CUBINS.iter().filter(|(_, arch, _)| *arch == architecture).collect();
        if images.is_empty() {
            let mut built: Vec<&str> = CUBINS.iter().map(|(_, arch, _)| *arch).collect();
            built.dedup();
            let built = built.join(", sm_");
            return Err(missing(&format!(
                "{name} is sm_{architecture}, this binary has kernels for sm_{built}"
            )));
        }
        // SAFETY: the primary context is retained once and kept until the process ends.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(said)?;
        // SAFETY: `context` was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(said)?;
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).map_err(said)?;
        let mut functions = HashMap::new();
        for (_, _, image) in images {
            // The loader wants the alignment of an ELF file.
            let mut aligned = vec![0_u64; image.len().div_ceil(8)];
            bytemuck::cast_slice_mut::<u64, u8>(&mut aligned)[..image.len()].copy_from_slice(image);
            // SAFETY: `aligned` holds a whole cubin and outlives the call, which copies it.
            let module =
                unsafe { result::module::load_data(aligned.as_ptr().cast()) }.map_err(said)?;
            functions.extend(kernels(module).map_err(said)?);
        }
        let opened = Self {
            name,
            uuid: uuid.bytes.iter().map(|b| format!("{:02x}", *b as u8)).collect(),
            context,
            stream,
            functions,
            arena: Mutex::new(Arc::new(Arena::empty())),
            upload: Mutex::default(),
            blas: Blas::default(),
            profile: Profile::default(),
            failure: Mutex::new(None),
        };
        let opened = Arc::new(opened);
        let pool = Memory::own(&opened, "workspace", workspace as usize)?;
        *lock(&opened.arena) = Arc::new(Arena::new(pool));
        Ok(opened)
    }

    /// Makes the GPU's context current on this thread.
    pub(crate) fn enter(&self) {
        // SAFETY: the context lives as long as the process.
        if let Err(e) = unsafe { result::ctx::set_current(self.context) } {
            self.fail(self.error(e));
        }
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Where step-long tensors are taken from.
    pub(crate) fn arena(&self) -> Arc<Arena> {
        Arc::clone(&lock(&self.arena))
    }

    pub(crate) fn error(&self, error: DriverError) -> KernelError {
        KernelError::Device { device: self.name.clone(), message: describe(error) }
    }

    /// Keeps the first failure.
    pub(crate) fn fail(&self, error: KernelError) {
        lock(&self.failure).get_or_insert(error);
    }

    /// Takes the first failure, if there was one.
    pub(crate) fn take_failure(&self) -> Result<(), KernelError> {
        lock(&self.failure).take().map_or(Ok(()), Err)
    }

    pub(crate) fn failed(&self) -> bool {
        lock(&self.failure).is_some()
    }

    /// Notes a driver call's failure.
    pub(crate) fn note(&self, outcome: Result<(), DriverError>) {
        if let Err(e) = outcome {
            self.fail(self.error(e));
        }
    }

    /// Queues a copy of `bytes`, which may be changed when this returns, to device memory.
    ///
    /// # Safety
    /// `to` starts at least `bytes.len()` bytes of device memory.
    pub(crate) unsafe fn copy_in(&self, to: u64, bytes: &[u8]) {
        self.enter();
        let stream = self.stream;
        self.note(if bytes.len() < upload::WORTHWHILE {
            // SAFETY: the caller's range. The driver stages pageable memory before the call returns.
            unsafe { result::memcpy_htod_async(to, bytes, stream) }
        } else {
            // SAFETY: the caller's range, and the context is current.
            unsafe { lock(&self.upload).copy(to, bytes, stream) }
        });
    }

    /// Frees what loading needed and steps do not.
    pub(crate) fn end_of_load(&self) {
        self.enter();
        lock(&self.upload).clear();
    }

    /// The kernel called `name`, allowed `shared` bytes of shared memory.
    fn function(&self, name: &str, shared: usize) -> Result<sys::CUfunction, KernelError> {
        let kernel = self.functions.get(name).ok_or_else(|| KernelError::Device {
            device: self.name.clone(),
            message: format!("no kernel is called {name}"),
        })?;
        if shared > USUAL_SHARED {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
            let function = kernel.function;
            // SAFETY: `function` was found in a module, which stays loaded.
            let raise = || unsafe {
                result::function::set_function_attribute(function, SHARED, LARGEST_SHARED)
            };
            kernel.raised.get_or_init(raise).map_err(|e| self.error(e))?;
        }
        Ok(kernel.function)
    }

    /// Queues a kernel. After a failure nothing is queued any more, so that no kernel runs on memory that was not got.
    pub(crate) fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        block: u32,
        shared: usize,
        arguments: &mut [*mut c_void],
    ) {
        if grid.0 * grid.1 * grid.2 == 0 || self.failed() {
            return;
        }
        self.enter();
        let function = match self.function(name, shared) {
            Ok(function) => function,
            Err(e) => return self.fail(e),
        };
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        self.profile.around(name, self.stream, || {
            // SAFETY: the arguments are of the number and types that the head of the kernel's file states (each call is
            // beside that list in review), and the memory they point to is alive until work queued later on this stream
            // reuses it.
            let queued = unsafe {
                result::launch_kernel(
                    function,
                    grid,
                    (block, 1, 1),
                    shared as u32,
                    self.stream,
                    arguments,
                )
            };
            if let Err(e) = queued {
                let message = format!("{name}: {}", describe(e));
                self.fail(KernelError::Device { device: self.name.clone(), message });
            }
        });
    }

    /// Waits for everything that was queued.
    pub(crate) fn synchronise(&self) {
        self.enter();
        // SAFETY: the stream lives as long as the device.
        self.note(unsafe { result::stream::synchronize(self.stream) });
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), KernelError> {
        self.enter();
        let (free, total) = result::mem_get_info().map_err(|e| self.error(e))?;
        Ok((free as u64, total as u64))
    }
}

fn describe(error: DriverError) -> String {
    let text = error.error_string().map(|t| t.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("CUDA error {}", error.0 as u32))
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .field("uuid", &self.uuid)
            .finish_non_exhaustive()
    }
}
