//! Conversations: the checkpoint's own template, rendered and tokenised as Hugging Face does.

use crate::error::{Error, Result};
use crate::tokenizer::{Tokenizer, literal};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value, context};
use ork_formats::model::Text;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions before the conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// As templates spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who.
    pub role: Role,
    /// What.
    pub content: String,
}

impl Message {
    /// One turn.
    #[must_use]
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
        }
    }
}

/// The template of one pack.
pub struct Template {
    environment: Environment<'static>,
    tokens: Vec<(String, String)>,
}

/// Name under which the template is known to the engine.
const NAME: &str = "chat";

impl Template {
    /// Compiles the pack's template.
    ///
    /// # Errors
    /// [`Error::Usage`] when the pack has none, [`Error::Input`] when it does not compile.
    pub fn new(text: &Text) -> Result<Self> {
        let source = text.chat_template.clone().ok_or_else(|| {
            Error::Usage("this pack has no chat template; use `ork run --raw`".into())
        })?;
        let mut environment = Environment::new();
        // What transformers sets, so that templates mean the same.
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .expect("the default delimiters are valid");
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |text: String| -> std::result::Result<Value, _> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, source).map_err(|e| {
            Error::Input(format!("the pack's chat template does not compile: {e:#}"))
        })?;
        Ok(Self {
            environment,
            tokens: text.tokens.clone(),
        })
    }

    /// The conversation as text. `answer` adds what makes the model speak next.
    ///
    /// # Errors
    /// [`Error::Usage`] with the template's own words, for instance when it refuses a system message.
    pub fn render(&self, messages: &[Message], answer: Answer) -> Result<String> {
        let template = self.environment.get_template(NAME).expect("added in new");
        let tokens = Value::from_pairs(self.tokens.iter().cloned());
        let turns: Vec<Value> = messages
            .iter()
            .map(|m| Value::from_pairs([("role", m.role.name()), ("content", &m.content)]))
            .collect();
        template
            .render(context! {
                messages => turns,
                add_generation_prompt => answer == Answer::Next,
                ..tokens
            })
            .map_err(|e| {
                let text = e.detail().map_or_else(|| e.to_string(), str::to_string);
                Error::Usage(format!(
                    "the chat template refuses this conversation: {text}"
                ))
            })
    }

    /// The conversation as ids. Special tokens spelled out in a message stay literal text; those that
    /// the template writes become special ids, BOS included, and nothing is added to them.
    ///
    /// # Errors
    /// As [`Template::render`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        answer: Answer,
    ) -> Result<Vec<u32>> {
        let specials = tokenizer.specials();
        let marked: Vec<Message> = messages
            .iter()
            .map(|m| Message::new(m.role, literal::mark(&m.content, specials)))
            .collect();
        let text = self.render(&marked, answer)?;
        tokenizer.encode_marked(&text)
    }
}

/// Whether the model speaks next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The text ends where the answer begins.
    Next,
    /// The text is the conversation so far.
    None,
}

/// Date in the format that templates ask for; only what they use: %d %b %Y and %Y-%m-%d.
fn strftime_now(format: &str) -> String {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    strftime(seconds / 86_400, format)
}

/// `days` since 1970-01-01 by the civil calendar (the days-from-civil algorithm, inverted).
fn strftime(days: u64, format: &str) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let name = MONTHS[month as usize - 1];
    format
        .replace("%Y", &year.to_string())
        .replace("%m", &format!("{month:02}"))
        .replace("%d", &format!("{day:02}"))
        .replace("%B", name)
        .replace("%b", &name[..3])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> Template {
        let text = Text {
            chat_template: Some(source.into()),
            tokens: vec![("bos_token".into(), "<s>".into())],
            ..Text::default()
        };
        Template::new(&text).unwrap()
    }

    #[test]
    fn python_isms_render() {
        let t = template(
            "{{ bos_token }}{% for m in messages %}\n  [{{ m['role'].upper() }}] {{ m.content.strip() }}\n{% endfor %}{% if add_generation_prompt %}[ME]{% endif %}",
        );
        let messages = [Message::new(Role::User, "  hi  ")];
        assert_eq!(
            t.render(&messages, Answer::Next).unwrap(),
            "<s>  [USER] hi\n[ME]"
        );
    }

    #[test]
    fn a_template_may_refuse() {
        let t = template("{{ raise_exception('no system role') }}");
        let error = t.render(&[], Answer::None).unwrap_err().to_string();
        assert!(error.contains("no system role"), "{error}");
    }

    #[test]
    fn dates_are_civil() {
        assert_eq!(strftime(0, "%d %b %Y"), "01 Jan 1970");
        assert_eq!(strftime(19_782, "%Y-%m-%d"), "2024-02-29");
        assert_eq!(strftime(20_787, "%d %B %Y"), "30 November 2026");
    }
}
