//! With the feature `cuda`: compiles `cuda/*.cu` to one cubin per architecture and writes the table that embeds them.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Architectures that cubins are made for. Kernels that use instructions of one family alone are guarded by
/// `__CUDA_ARCH_FEAT_SM90_ALL`.
const ARCHITECTURES: &[&str] = &["90a"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for variable in ["NVCC", "CUDA_HOME"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!("cargo:rerun-if-changed=cuda");
    if let Err(reason) = compile() {
        eprintln!("error: {reason}");
        std::process::exit(1);
    }
}

fn compile() -> Result<(), String> {
    let nvcc = find_nvcc()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut sources: Vec<PathBuf> = fs::read_dir("cuda")
        .map_err(|e| format!("kernels/cuda: {e}"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .collect();
    sources.sort();
    let mut jobs: Vec<(PathBuf, &str)> = Vec::new();
    for source in &sources {
        jobs.extend(ARCHITECTURES.iter().map(|arch| (source.clone(), *arch)));
    }
    let table = table(&jobs, &out)?;
    fs::write(out.join("cubins.rs"), table).map_err(|e| format!("cubins.rs: {e}"))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (queue, failures) = (Mutex::new(jobs), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((source, arch)) = queue.lock().ok().and_then(|mut jobs| jobs.pop()) {
                    if let Err(reason) = cubin(&nvcc, &source, arch, &out)
                        && let Ok(mut failures) = failures.lock()
                    {
                        failures.push(reason);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().map_err(|e| e.to_string())?;
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// `NVCC`, `CUDA_HOME`, the wheels that `kernels/cuda/install-nvcc` puts into `.cache/nvcc`, `PATH`: in this order.
fn find_nvcc() -> Result<OsString, String> {
    if let Some(nvcc) = env::var_os("NVCC") {
        return match Path::new(&nvcc).exists() {
            true => Ok(nvcc),
            false => Err(format!("NVCC is {nvcc:?}, and there is no such file")),
        };
    }
    if let Some(home) = env::var_os("CUDA_HOME") {
        let nvcc = Path::new(&home).join("bin/nvcc");
        return match nvcc.exists() {
            true => Ok(nvcc.into()),
            false => Err(format!("CUDA_HOME is {home:?}, and {} does not exist", nvcc.display())),
        };
    }
    let wheels = Path::new("../.cache/nvcc/nvidia/cu13/bin/nvcc");
    if wheels.exists() {
        return Ok(wheels.canonicalize().map_err(|e| e.to_string())?.into());
    }
    let on_path = env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join("nvcc").exists()));
    if on_path {
        return Ok("nvcc".into());
    }
    Err("the feature `cuda` needs nvcc 13.0 or later and none was found: set NVCC or CUDA_HOME, put nvcc on PATH, or run \
         kernels/cuda/install-nvcc, which installs pinned wheels (105 MB) into .cache/nvcc"
        .into())
}

fn cubin_path(source: &Path, arch: &str, out: &Path) -> Result<PathBuf, String> {
    let stem = source.file_stem().ok_or("a source without a name")?.to_string_lossy();
    Ok(out.join(format!("{stem}.sm_{arch}.cubin")))
}

fn cubin(nvcc: &OsString, source: &Path, arch: &str, out: &Path) -> Result<(), String> {
    let target = cubin_path(source, arch, out)?;
    if is_current(&target, source)? {
        return Ok(());
    }
    let output = Command::new(nvcc)
        .args(["-cubin", "-O3", "-std=c++17", "-lineinfo", "-Xptxas", "-v"])
        .arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"))
        .arg("-o")
        .arg(&target)
        .arg(source)
        .output()
        .map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{}: nvcc failed:\n{log}", source.display()));
    }
    spills(source, &log).inspect_err(|_| drop(fs::remove_file(&target)))
}

/// Whether a cubin is newer than its source, every header and this program: one kernel's change does not compile them all.
fn is_current(target: &Path, source: &Path) -> Result<bool, String> {
    let changed = |path: &Path| {
        let found = fs::metadata(path).and_then(|m| m.modified());
        found.map_err(|e| format!("{}: {e}", path.display()))
    };
    if !target.exists() {
        return Ok(false);
    }
    let made = changed(target)?;
    let headers = fs::read_dir("cuda").map_err(|e| format!("kernels/cuda: {e}"))?;
    let headers = headers
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cuh"));
    for input in headers.chain([source.to_owned(), PathBuf::from("build.rs")]) {
        if changed(&input)? >= made {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A kernel that spills registers is many times slower than it looks: it does not build.
fn spills(source: &Path, log: &str) -> Result<(), String> {
    let mut kernel = "";
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            kernel = name;
        }
        let Some((_, rest)) = line.split_once("bytes stack frame, ") else { continue };
        if !rest.starts_with("0 bytes spill stores, 0 bytes spill loads") {
            return Err(format!("{}: {kernel} spills registers: {rest}", source.display()));
        }
    }
    Ok(())
}

fn table(jobs: &[(PathBuf, &str)], out: &Path) -> Result<String, String> {
    let mut table = String::from("/// Source file, architecture, cubin.\n");
    table.push_str("pub(super) static CUBINS: &[(&str, &str, &[u8])] = &[\n");
    for (source, arch) in jobs {
        let stem = source.file_stem().ok_or("a source without a name")?.to_string_lossy();
        let path = cubin_path(source, arch, out)?;
        writeln!(table, "    ({stem:?}, {arch:?}, include_bytes!({path:?})),")
            .map_err(|e| e.to_string())?;
    }
    table.push_str("];\n");
    Ok(table)
}
