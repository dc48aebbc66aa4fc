//! What a pack is made of, for people and for scripts.

use crate::memory::{REGIONS, region_bytes, window};
use ork_caps::Caps;
use ork_formats::model::{HostForm, Manifest, Tensor};
use ork_formats::regcmd;
use serde::Serialize;
use std::fmt;

/// Summary of a pack.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// SoC.
    pub soc: &'static str,
    /// How far its limits can be trusted.
    pub caps_status: &'static str,
    /// The checkpoint's `model_type`.
    pub family: String,
    /// `orkc` version that compiled it.
    pub compiler: String,
    /// (file, BLAKE3 hex) of every source file; shown when asked for.
    pub sources: Vec<(String, String)>,
    /// Options the pack was compiled with.
    pub options: Vec<(String, String)>,
    /// Tensors with an NPU form.
    pub npu_tensors: usize,
    /// (form, tensors) the CPU reads.
    pub host_tensors: Vec<(&'static str, usize)>,
    /// (tensors, bytes) of the int8 copies that prefill multiplies experts with.
    pub expert_copies: (usize, u64),
    /// Bytes of the host section.
    pub host_bytes: u64,
    /// (region, bytes) of the IOVA window.
    pub regions: Vec<(String, u64)>,
    /// Sum of the regions.
    pub window_used: u64,
    /// Bytes a plan may use.
    pub window_budget: u64,
    /// Allocations.
    pub extents: usize,
    /// Command programs.
    pub programs: usize,
    /// Programs of the longest chain: tasks of its commit.
    pub longest_chain: u32,
    /// Bytes of the command streams.
    pub regcmd_bytes: u64,
    /// NPU weight bytes that are padding.
    pub padding_bytes: u64,
    /// Bound on any int32 accumulator; known while compiling only.
    pub max_accumulator: Option<u64>,
    /// Size of the file.
    pub file_bytes: Option<u64>,
    /// BLAKE3 of the header page, hex.
    pub hash: Option<String>,
    /// Wall-clock time of the compilation.
    pub seconds: Option<f64>,
    /// What was odd about the checkpoint, a line each; known while compiling only.
    pub warnings: Vec<String>,
}

/// What the manifest does not say.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Bytes of the host section.
    pub host_bytes: u64,
    /// Largest accumulator.
    pub accumulator: Option<u64>,
    /// Hash of the header page.
    pub hash: Option<[u8; 32]>,
    /// Size of the file.
    pub file_bytes: Option<u64>,
    /// Wall-clock time.
    pub seconds: Option<f64>,
    /// Show where the pack came from.
    pub provenance: bool,
    /// What was odd about the checkpoint.
    pub warnings: Vec<String>,
}

impl Report {
    /// Sums up `manifest`.
    #[must_use]
    pub fn new(manifest: &Manifest, caps: &'static Caps, facts: Facts) -> Self {
        let extents = manifest.npu.as_ref().map_or(&[][..], |p| &p.extents);
        let programs = manifest.npu.as_ref().map_or(0, |p| p.programs.len());
        let forms = || manifest.tensors.iter().filter_map(|t| t.npu.as_ref());
        Self {
            soc: caps.name,
            caps_status: caps.status().word(),
            family: manifest.provenance.family.clone(),
            compiler: manifest.provenance.compiler.clone(),
            sources: match facts.provenance {
                true => manifest
                    .provenance
                    .sources
                    .iter()
                    .map(|(name, hash)| (name.clone(), hex(hash)))
                    .collect(),
                false => Vec::new(),
            },
            options: manifest.provenance.options.clone(),
            npu_tensors: forms().count(),
            host_tensors: count_forms(&manifest.tensors),
            expert_copies: manifest
                .tensors
                .iter()
                .filter_map(|t| t.batch)
                .fold((0, 0), |(n, bytes), t| {
                    (n + 1, bytes + t.at.bytes + t.scales.bytes)
                }),
            host_bytes: facts.host_bytes,
            regions: REGIONS
                .iter()
                .map(|r| (format!("{r:?}").to_lowercase(), region_bytes(extents, *r)))
                .collect(),
            window_used: extents.iter().map(|e| e.bytes).sum(),
            window_budget: window(caps),
            extents: extents.len(),
            programs,
            longest_chain: forms()
                .flat_map(|f| &f.chains)
                .map(|c| c.count)
                .max()
                .unwrap_or(0),
            regcmd_bytes: (programs * regcmd::BYTES) as u64,
            padding_bytes: manifest.tensors.iter().map(padding).sum(),
            max_accumulator: facts.accumulator,
            file_bytes: facts.file_bytes,
            hash: facts.hash.map(|h| hex(&h)),
            seconds: facts.seconds,
            warnings: facts.warnings,
        }
    }
}

fn hex(hash: &[u8; 32]) -> String {
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

fn padding(tensor: &Tensor) -> u64 {
    let Some(form) = &tensor.npu else { return 0 };
    let blocks = form.blocks.iter();
    let stored: u64 = blocks
        .map(|b| u64::from(b.cols) * u64::from(form.slice_k))
        .sum();
    stored.saturating_sub(u64::from(tensor.n) * u64::from(tensor.k))
}

fn count_forms(tensors: &[Tensor]) -> Vec<(&'static str, usize)> {
    let name = |t: &Tensor| match t.host {
        HostForm::Float { .. } => "float",
        HostForm::Int8 { .. } => "int8",
        HostForm::Int4 { .. } => "int4",
    };
    ["int4", "int8", "float"]
        .map(|form| (form, tensors.iter().filter(|t| name(t) == form).count()))
        .into_iter()
        .filter(|(_, count)| *count != 0)
        .collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options: Vec<_> = self
            .options
            .iter()
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        let host: Vec<_> = self
            .host_tensors
            .iter()
            .map(|(k, n)| format!("{n} {k}"))
            .collect();
        let mut line = |name: &str, value: String| writeln!(f, "{name:<22} {value}");
        line("SoC", format!("{} (limits {})", self.soc, self.caps_status))?;
        line("Model", self.family.clone())?;
        line("Compiler", format!("orkc {}", self.compiler))?;
        line("Options", options.join(" "))?;
        for (name, hash) in &self.sources {
            line("Source", format!("{hash} {name}"))?;
        }
        line("Tensors on NPU", self.npu_tensors.to_string())?;
        line("Tensors on CPU", host.join(", "))?;
        if let (tensors @ 1.., bytes) = self.expert_copies {
            let text = format!("{tensors} int8 for prefill, {}", mib(bytes));
            line("Experts twice", text)?;
        }
        line("Host bytes", mib(self.host_bytes))?;
        for (name, bytes) in &self.regions {
            line(&format!("NPU {name}"), mib(*bytes))?;
        }
        let share = 100.0 * self.window_used as f64 / self.window_budget as f64;
        let window = format!(
            "{} of {} ({share:.1}%)",
            mib(self.window_used),
            mib(self.window_budget)
        );
        line("NPU window", window)?;
        line("Allocations", self.extents.to_string())?;
        line(
            "Programs",
            format!("{} (longest chain {})", self.programs, self.longest_chain),
        )?;
        line("Command bytes", mib(self.regcmd_bytes))?;
        line("Padding", mib(self.padding_bytes))?;
        if let Some(bound) = self.max_accumulator {
            let share = 100.0 * bound as f64 / f64::from(i32::MAX);
            line(
                "Largest accumulator",
                format!("{bound} ({share:.1}% of int32)"),
            )?;
        }
        if let Some(bytes) = self.file_bytes {
            line("File", mib(bytes))?;
        }
        if let Some(hash) = &self.hash {
            line("Hash", hash.clone())?;
        }
        match self.seconds {
            Some(seconds) => line("Time", format!("{seconds:.1} s")),
            None => Ok(()),
        }
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_manifest_has_a_report_in_both_forms() {
        let report = Report::new(&Manifest::empty(), &ork_caps::RK3588, Facts::default());
        assert!(
            report
                .to_string()
                .contains("NPU window             0.00 MiB of 3836.00 MiB")
        );
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["programs"], 0);
    }
}
