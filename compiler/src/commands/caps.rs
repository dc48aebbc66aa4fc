//! `orkc caps`

use super::say;
use clap::Subcommand;
use ork_caps::Caps;
use ork_compiler::error::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(Subcommand)]
pub(crate) enum CapsCommand {
    /// Every SoC this build knows
    List {
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Every limit of one SoC with its unit, source and status
    Show {
        /// SoC name
        soc: String,
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Limits in which two SoCs differ
    Diff {
        /// SoC name
        a: String,
        /// SoC name
        b: String,
    },
}

pub(crate) fn run(command: &CapsCommand) -> Result<()> {
    match command {
        CapsCommand::List { json } => list(*json),
        CapsCommand::Show { soc, json } => show(find(soc)?, *json),
        CapsCommand::Diff { a, b } => diff(find(a)?, find(b)?),
    }
}

fn find(name: &str) -> Result<&'static Caps> {
    ork_caps::find(name).ok_or_else(|| {
        let known: Vec<_> = ork_caps::all().iter().map(|c| c.name).collect();
        Error::Mismatch(format!(
            "SoC `{name}` is unknown; known are {}",
            known.join(", ")
        ))
    })
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("plain data") + "\n"
}

fn list(as_json: bool) -> Result<()> {
    if as_json {
        let rows: Vec<Value> = ork_caps::all().iter().map(|c| head(c)).collect();
        return say(&pretty(&Value::Array(rows)));
    }
    let mut text = String::new();
    for c in ork_caps::all() {
        writeln!(
            text,
            "{:<8} {} cores  {:<9} {:016x}  {}",
            c.name,
            c.cores.value,
            c.status().word(),
            c.fingerprint(),
            c.compatible.join(" ")
        )
        .expect("writing to a String");
    }
    say(&text)
}

fn head(c: &Caps) -> Value {
    json!({
        "name": c.name,
        "compatible": c.compatible,
        "cores": c.cores.value,
        "status": c.status().word(),
        "fingerprint": format!("{:016x}", c.fingerprint()),
        "notes": c.notes,
    })
}

fn show(c: &Caps, as_json: bool) -> Result<()> {
    let mut rows = serde_json::Map::new();
    let mut text = format!(
        "{} ({}), fingerprint {:016x}\n",
        c.name,
        c.status().word(),
        c.fingerprint()
    );
    if !c.notes.is_empty() {
        writeln!(text, "note: {}", c.notes).expect("writing to a String");
    }
    c.numbers(|field, value, unit, source, status| {
        writeln!(
            text,
            "{field:<16} {value:>12} {unit:<10} {:<9} {source}",
            status.word()
        )
        .expect("writing to a String");
        rows.insert(
            field.into(),
            json!({"value": value, "unit": unit, "source": source, "status": status.word()}),
        );
    });
    let fact = &c.m_caps;
    let table: Vec<String> = fact.value.iter().map(|(k, m)| format!("{k}:{m}")).collect();
    writeln!(
        text,
        "m_caps           {} ({}) {}",
        table.join(" "),
        fact.status.word(),
        fact.source
    )
    .expect("writing to a String");
    rows.insert(
        "m_caps".into(),
        json!({"value": fact.value, "unit": fact.unit, "source": fact.source, "status": fact.status.word()}),
    );
    match as_json {
        true => {
            let mut value = head(c);
            value["limits"] = Value::Object(rows);
            say(&pretty(&value))
        }
        false => say(&text),
    }
}

/// One line per differing value; statuses that differ count too. Nothing printed: no difference.
fn diff(a: &Caps, b: &Caps) -> Result<()> {
    let collect = |c: &Caps| {
        let mut rows = Vec::new();
        c.numbers(|field, value, unit, _, status| {
            rows.push((field, format!("{value} {unit} ({})", status.word())));
        });
        rows.push((
            "m_caps",
            format!("{:?} ({})", c.m_caps.value, c.m_caps.status.word()),
        ));
        rows
    };
    let mut text = String::new();
    for ((field, a), (_, b)) in collect(a).into_iter().zip(collect(b)) {
        if a != b {
            writeln!(text, "{field:<16} {a} | {b}").expect("writing to a String");
        }
    }
    say(&text)
}
