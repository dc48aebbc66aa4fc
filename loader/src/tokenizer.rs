//! Text to ids and back, from the definition frozen into the pack.

use crate::error::{Error, Result};
use kitoken::{Decoding, Definition, Kitoken};
use ork_formats::model::Text;

/// A tokenizer with the prompt rules of its checkpoint.
pub struct Tokenizer {
    inner: Kitoken,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// (text, id), longest first.
    specials: Vec<(String, u32)>,
}

impl Tokenizer {
    /// Loads a kitoken definition.
    ///
    /// # Errors
    /// [`Error::Input`] when it does not decode.
    pub fn new(definition: &[u8], text: &Text) -> Result<Self> {
        let fault = |e: &dyn std::fmt::Display| {
            Error::Input(format!("the pack's tokenizer does not load: {e}"))
        };
        let mut definition = Definition::from_slice(definition).map_err(|e| fault(&e))?;
        // The decoder takes the longest token of the vocabulary without asking whether there is one.
        if definition.model.vocab().is_empty() {
            return Err(fault(&"its vocabulary is empty"));
        }
        // These act on the ends of a whole text. Ids are decoded one by one, so that each would lose
        // the space before its word; and generated text continues the prompt, so that not even the
        // first may.
        let ends = |d: &Decoding| matches!(d, Decoding::Strip { .. } | Decoding::Extend { .. });
        definition.config.decoding.retain(|d| !ends(d));
        let mut specials: Vec<(String, u32)> = definition
            .specials
            .iter()
            .filter_map(|s| Some((String::from_utf8(s.bytes.to_vec()).ok()?, s.id)))
            .filter(|(text, _)| !text.is_empty())
            .collect();
        specials.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.cmp(b)));
        let inner = Kitoken::from_definition(definition).map_err(|e| fault(&e))?;
        Ok(Self {
            inner,
            prefix: text.prefix.clone(),
            suffix: text.suffix.clone(),
            specials,
        })
    }

    /// Ids of a prompt, with BOS and the like as the checkpoint's post-processor puts them.
    ///
    /// # Errors
    /// [`Error::Usage`] for text the vocabulary cannot express.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.encode_plain(text)?;
        Ok([&self.prefix[..], &ids, &self.suffix].concat())
    }

    /// Ids of a text as it is, with nothing put around it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.inner
            .encode(text, true)
            .map_err(|e| Error::Usage(format!("the text cannot be tokenised: {e}")))
    }

    /// Special tokens, longest first.
    #[must_use]
    pub fn specials(&self) -> &[(String, u32)] {
        &self.specials
    }

    /// Ids of rendered template text in which [`literal::mark`] has protected the messages: specials of
    /// the template become special ids, protected ones stay text. Nothing is added.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_marked(&self, text: &str) -> Result<Vec<u32>> {
        let encode = |text: &str, specials: bool| {
            self.inner
                .encode(text, specials)
                .map_err(|e| Error::Usage(format!("the prompt cannot be tokenised: {e}")))
        };
        if !text.contains(literal::MARK) {
            return encode(text, true);
        }
        let mut ids = Vec::new();
        for piece in literal::split(text, &self.specials) {
            match piece {
                literal::Piece::Special(id) => ids.push(id),
                literal::Piece::Text(text) => ids.extend(encode(&text, false)?),
            }
        }
        Ok(ids)
    }

    /// Raw bytes of one id; nothing for specials and for ids beyond the tokenizer (padded vocabularies).
    #[must_use]
    pub fn id_bytes(&self, id: u32) -> Vec<u8> {
        self.inner.decode([id], false).unwrap_or_default()
    }
}

/// Keeps special tokens that a person typed from becoming special.
pub mod literal {
    /// A private-use character, put inside every special token's text in a message.
    pub const MARK: char = '\u{f8f0}';

    /// Part of a marked text.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum Piece {
        /// A special token of the template.
        Special(u32),
        /// Text between them, marks taken out.
        Text(String),
    }

    /// `text` with a mark behind the first character of each special token in it. Marks that were
    /// there already are dropped.
    #[must_use]
    pub fn mark(text: &str, specials: &[(String, u32)]) -> String {
        let text = text.replace(MARK, "");
        let mut out = String::with_capacity(text.len());
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            let special = specials.iter().any(|(s, _)| rest.starts_with(s.as_str()));
            out.push(first);
            if special {
                out.push(MARK);
            }
            rest = &rest[first.len_utf8()..];
        }
        out
    }

    /// Splits at the specials that carry no mark.
    #[must_use]
    pub fn split(text: &str, specials: &[(String, u32)]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            match specials.iter().find(|(s, _)| rest.starts_with(s.as_str())) {
                Some((special, id)) => {
                    if !plain.is_empty() {
                        pieces.push(Piece::Text(std::mem::take(&mut plain)));
                    }
                    pieces.push(Piece::Special(*id));
                    rest = &rest[special.len()..];
                }
                None => {
                    if first != MARK {
                        plain.push(first);
                    }
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        pieces
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn typed_specials_survive_as_text() {
            let specials = [("<|end|>".to_string(), 7), ("<|".to_string(), 8)];
            let typed = mark("a<|end|>b", &specials);
            let text = format!("{typed}<|end|>");
            assert_eq!(
                split(&text, &specials),
                [Piece::Text("a<|end|>b".into()), Piece::Special(7)]
            );
        }
    }
}

/// Turns token bytes into text without ever emitting part of a character.
#[derive(Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes; returns what is complete. Invalid runs become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(all) => {
                    text.push_str(all);
                    self.held.clear();
                    return text;
                }
                Err(e) => {
                    let valid = e.valid_up_to();
                    text.push_str(std::str::from_utf8(&self.held[..valid]).expect("valid prefix"));
                    let Some(bad) = e.error_len() else {
                        self.held.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.held.drain(..valid + bad);
                }
            }
        }
    }

    /// What is left at the end: a cut character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        match std::mem::take(&mut self.held).is_empty() {
            true => String::new(),
            false => char::REPLACEMENT_CHARACTER.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kitoken::{
        Configuration, Fallback, Metadata, Model, SpecialToken, SpecialTokenKind, Token,
    };

    /// A SentencePiece-like definition: `▁` for spaces, the first of which decoding a text drops.
    fn definition(words: &[&str]) -> Vec<u8> {
        let vocab: Vec<Token> = (0..)
            .zip(words)
            .map(|(id, word)| Token::from((id, word.as_bytes())))
            .collect();
        let special = SpecialToken {
            id: words.len() as u32,
            bytes: b"<end>".to_vec(),
            kind: SpecialTokenKind::Control,
            ident: None,
            score: 0.0,
            extract: true,
        };
        let config = Configuration {
            fallback: vec![Fallback::Skip],
            decoding: vec![
                Decoding::Strip {
                    character: '▁',
                    left: 1,
                    right: 0,
                },
                Decoding::Replace {
                    pattern: '▁'.into(),
                    replacement: " ".into(),
                },
            ],
            ..Configuration::default()
        };
        Definition {
            meta: Metadata::default(),
            model: Model::BytePair {
                vocab,
                chars: false,
            },
            specials: vec![special],
            config,
        }
        .to_vec()
    }

    fn text(prefix: &[u32], suffix: &[u32]) -> Text {
        Text {
            prefix: prefix.to_vec(),
            suffix: suffix.to_vec(),
            ..Text::default()
        }
    }

    #[test]
    fn words_keep_their_space_and_specials_are_silent() {
        let tokenizer = Tokenizer::new(&definition(&["▁a", "▁b", "c"]), &text(&[], &[])).unwrap();
        let bytes: Vec<u8> = [0, 2, 3, 1, 99]
            .iter()
            .flat_map(|id| tokenizer.id_bytes(*id))
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), " ac b");
    }

    #[test]
    fn specials_in_the_text_are_recognised_and_the_rest_is_added_once() {
        let tokenizer = Tokenizer::new(&definition(&["a", "b"]), &text(&[7, 8], &[9])).unwrap();
        assert_eq!(tokenizer.encode("a<end>b").unwrap(), [7, 8, 0, 2, 1, 9]);
        assert_eq!(tokenizer.encode("").unwrap(), [7, 8, 9]);
    }

    #[test]
    fn damaged_definitions_are_bad_input() {
        for bytes in [&b""[..], b"kitoken\0\x01\xff\xff", &definition(&[])] {
            let fault = Tokenizer::new(bytes, &text(&[], &[])).err();
            assert!(matches!(fault, Some(Error::Input(_))), "{fault:?}");
        }
    }

    #[test]
    fn a_split_emoji_comes_out_whole() {
        let mut stream = Utf8Stream::default();
        let bytes = "a😀b".as_bytes();
        let text: String = bytes.iter().map(|b| stream.push(&[*b])).collect();
        assert_eq!(text, "a😀b");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn invalid_and_cut_bytes_become_replacements() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"x\xff\xc3"), "x\u{fffd}");
        assert_eq!(stream.push(b"\xa9"), "é");
        assert_eq!(stream.push(b"\xf0\x9f"), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }
}
