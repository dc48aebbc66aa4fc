//! Typed reads of `config.json`: a wrong type is an error, never a silent default.

use crate::error::{Error, Result};
use serde_json::Value;

/// Largest dimension accepted: keeps every product of two of them inside u64 and every byte offset
/// of a real model, while a corrupted number is still refused before anything is allocated.
const LARGEST: u64 = 1 << 24;
/// Most layers; the deepest published models have a few hundred.
const LAYERS: u32 = 4096;

/// A JSON object of the configuration, with the name that errors give it.
#[derive(Clone, Copy)]
pub(crate) struct Config<'a> {
    value: &'a Value,
    name: &'a str,
}

impl<'a> Config<'a> {
    /// `name` is what errors call the object, such as `config.json`.
    pub(crate) fn new(value: &'a Value, name: &'a str) -> Self {
        Self { value, name }
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        Error::Input(match &self.value[key] {
            Value::Null => format!("{}: {key} is missing; add {expected}", self.name),
            found => format!("{}: {key} is {found}, expected {expected}", self.name),
        })
    }

    /// Whether `key` is there and not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        !self.value[key].is_null()
    }

    /// A dimension or count, at least 1.
    pub(crate) fn count(&self, key: &str) -> Result<u32> {
        let found = self.value[key]
            .as_u64()
            .filter(|v| (1..=LARGEST).contains(v));
        found
            .map(|v| v as u32)
            .ok_or_else(|| self.wrong(key, &format!("an integer from 1 to {LARGEST}")))
    }

    /// As [`Config::count`], for the number of layers.
    pub(crate) fn layers(&self, key: &str) -> Result<u32> {
        match self.count(key)? {
            n if n <= LAYERS => Ok(n),
            _ => Err(self.wrong(key, &format!("an integer from 1 to {LAYERS}"))),
        }
    }

    /// As [`Config::count`] when present, else `default`.
    pub(crate) fn count_or(&self, key: &str, default: u32) -> Result<u32> {
        match self.has(key) {
            true => self.count(key),
            false => Ok(default),
        }
    }

    /// A finite number above zero.
    pub(crate) fn positive(&self, key: &str) -> Result<f64> {
        let found = self.value[key].as_f64();
        found
            .filter(|v| v.is_finite() && 0.0 < *v)
            .ok_or_else(|| self.wrong(key, "a number above 0"))
    }

    /// A finite number above zero, `default` when absent.
    pub(crate) fn positive_or(&self, key: &str, default: f64) -> Result<f64> {
        match self.has(key) {
            true => self.positive(key),
            false => Ok(default),
        }
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str) -> Result<f64> {
        let found = self.value[key].as_f64();
        found
            .filter(|v| v.is_finite())
            .ok_or_else(|| self.wrong(key, "a number"))
    }

    /// A list of finite numbers above zero.
    pub(crate) fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let list = self.value[key].as_array();
        let positive = |v: &Value| v.as_f64().filter(|v| v.is_finite() && 0.0 < *v);
        list.and_then(|list| list.iter().map(positive).collect())
            .ok_or_else(|| self.wrong(key, "a list of numbers above 0"))
    }

    /// A list of 0, 1, false or true; `None` when absent.
    pub(crate) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        if !self.has(key) {
            return Ok(None);
        }
        let flag = |v: &Value| v.as_bool().or(v.as_u64().map(|v| v != 0));
        let list = self.value[key].as_array();
        list.and_then(|list| list.iter().map(flag).collect())
            .map(Some)
            .ok_or_else(|| self.wrong(key, "a list of 0 and 1"))
    }

    /// A list of layer numbers; empty when absent.
    pub(crate) fn indices(&self, key: &str) -> Result<Vec<u32>> {
        if !self.has(key) {
            return Ok(Vec::new());
        }
        let index = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
        let list = self.value[key].as_array();
        list.and_then(|list| list.iter().map(index).collect())
            .ok_or_else(|| self.wrong(key, "a list of layer numbers"))
    }

    /// A boolean, `default` when absent.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match &self.value[key] {
            Value::Null => Ok(default),
            found => found
                .as_bool()
                .ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// A string, `None` when absent.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match &self.value[key] {
            Value::Null => Ok(None),
            found => match found.as_str() {
                Some(text) => Ok(Some(text)),
                None => Err(self.wrong(key, "a string")),
            },
        }
    }

    /// A list of strings, `None` when absent.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        if !self.has(key) {
            return Ok(None);
        }
        let list = self.value[key].as_array();
        list.and_then(|list| list.iter().map(Value::as_str).collect())
            .map(Some)
            .ok_or_else(|| self.wrong(key, "a list of strings"))
    }

    /// A nested object, named `key` in errors; `None` when absent.
    pub(crate) fn object(&self, key: &'a str) -> Result<Option<Config<'a>>> {
        match &self.value[key] {
            Value::Null => Ok(None),
            found if found.is_object() => Ok(Some(Config::new(found, key))),
            _ => Err(self.wrong(key, "an object")),
        }
    }
}
