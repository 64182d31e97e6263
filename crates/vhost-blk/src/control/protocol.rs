// SPDX-License-Identifier: Apache-2.0
//! Calls and replies of Varlink, without a socket.

use crate::failure::{Failure, Sort};
use serde_json::{Map, Value, json};
use std::fmt;

/// The interface of the daemon.
pub const INTERFACE: &str = "io.vhostblk";
/// Its description.
pub const DESCRIPTION: &str = include_str!("io.vhostblk.varlink");
/// The interface of every Varlink service.
pub const SERVICE: &str = "org.varlink.service";
/// Its description.
pub const SERVICE_DESCRIPTION: &str = include_str!("org.varlink.service.varlink");

/// A digest of the description (CRC-32): the interfaces of two builds of one version may differ.
pub fn interface_digest() -> String {
    format!("{:08x}", crc32fast::hash(DESCRIPTION.as_bytes()))
}

/// A call of a method.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The method with its interface.
    pub method: String,
    /// Parameters by name.
    pub parameters: Map<String, Value>,
    /// The client wants no reply.
    pub oneway: bool,
    /// The client takes several replies.
    pub more: bool,
}

/// The error of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// There is no such interface.
    InterfaceNotFound(String),
    /// There is no such method.
    MethodNotFound(String),
    /// A parameter is missing, unknown, or has a wrong type or value.
    InvalidParameter(String),
    /// The method needs `more`.
    ExpectedMore,
    /// The command failed.
    Failure(Failure),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::InterfaceNotFound(_) => f.write_str("there is no such interface"),
            CallError::MethodNotFound(_) => f.write_str("there is no such method"),
            CallError::InvalidParameter(name) => {
                write!(f, "the parameter {name:?} is missing, unknown or wrong")
            }
            CallError::ExpectedMore => f.write_str("the call has no `more`"),
            CallError::Failure(failure) => failure.fmt(f),
        }
    }
}

impl From<Failure> for CallError {
    fn from(failure: Failure) -> Self {
        CallError::Failure(failure)
    }
}

impl Call {
    /// The call in a message; `None`: it is none.
    pub fn of(message: Value) -> Option<Call> {
        let Value::Object(mut fields) = message else { return None };
        let Some(Value::String(method)) = fields.remove("method") else { return None };
        let parameters = match fields.remove("parameters") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(parameters)) => parameters,
            Some(_) => return None,
        };
        let mut flag = |name: &str| match fields.remove(name) {
            None | Some(Value::Null) => Some(false),
            Some(Value::Bool(on)) => Some(on),
            Some(_) => None,
        };
        let (oneway, more) = (flag("oneway")?, flag("more")?);
        flag("upgrade")?;
        Some(Call { method, parameters, oneway, more })
    }

    /// A parameter; `None` if it is missing or null.
    ///
    /// # Errors
    /// [`CallError::InvalidParameter`] if `convert` refuses it.
    pub fn optional<T>(
        &mut self,
        name: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, CallError> {
        match self.parameters.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match convert(&value) {
                None => Err(CallError::InvalidParameter(name.to_owned())),
                some => Ok(some),
            },
        }
    }

    /// A parameter that has to be there.
    ///
    /// # Errors
    /// [`CallError::InvalidParameter`] if it is not, or `convert` refuses it.
    pub fn required<T>(
        &mut self,
        name: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, CallError> {
        self.optional(name, convert)?.ok_or_else(|| CallError::InvalidParameter(name.to_owned()))
    }

    /// Checks that no parameter is left.
    ///
    /// # Errors
    /// [`CallError::InvalidParameter`] if the method does not know one.
    pub fn no_more(&self) -> Result<(), CallError> {
        match self.parameters.keys().next() {
            None => Ok(()),
            Some(name) => Err(CallError::InvalidParameter(name.clone())),
        }
    }
}

/// A string parameter. One with a control character is wrong: it could forge lines of the log.
pub fn text(value: &Value) -> Option<String> {
    let text = value.as_str()?;
    (!text.contains(char::is_control)).then(|| text.to_owned())
}

/// The reply to a successful call.
pub fn reply(parameters: Value, continues: bool) -> Value {
    match continues {
        true => json!({"parameters": parameters, "continues": true}),
        false => json!({"parameters": parameters}),
    }
}

/// The reply to a failed call.
pub fn error(error: CallError) -> Value {
    let of_service = |name: &str, parameters: Value| json!({"error": format!("{SERVICE}.{name}"), "parameters": parameters});
    match error {
        CallError::InterfaceNotFound(name) => {
            of_service("InterfaceNotFound", json!({"interface": name}))
        }
        CallError::MethodNotFound(name) => of_service("MethodNotFound", json!({"method": name})),
        CallError::InvalidParameter(name) => {
            of_service("InvalidParameter", json!({"parameter": name}))
        }
        CallError::ExpectedMore => of_service("ExpectedMore", json!({})),
        CallError::Failure(Failure { what, why, remedy, sort, .. }) => {
            let name = match sort {
                // A daemon that refuses a command has answered.
                Sort::Run | Sort::NoAnswer => "Refused",
                Sort::Usage => "InvalidOptions",
                Sort::NoSuchDisk => "NoSuchDisk",
                Sort::Busy => "Busy",
            };
            let parameters = json!({"what": what, "why": why, "remedy": remedy});
            json!({"error": format!("{INTERFACE}.{name}"), "parameters": parameters})
        }
    }
}

/// The result in a reply: its parameters, or its error.
///
/// # Errors
/// [`Failure`] of the daemon, about a call that the daemon does not know, or about a message that is
/// no reply.
pub fn result(reply: Value, what: &str) -> Result<Value, Failure> {
    let Value::Object(mut reply) = reply else {
        let why = format!("the daemon answers {reply}, which is no reply");
        return Err(Failure::run(what, why, "use the same version of both programs"));
    };
    let parameters = reply.remove("parameters").unwrap_or_default();
    let Some(error) = reply.get("error").and_then(Value::as_str) else { return Ok(parameters) };
    let word = |name: &str| parameters[name].as_str().unwrap_or_default();
    let told = Failure::run(word("what"), word("why"), word("remedy"));
    let told = match error.rsplit_once('.') {
        Some((INTERFACE, "Refused")) => told,
        Some((INTERFACE, "InvalidOptions")) => Failure { sort: Sort::Usage, ..told },
        Some((INTERFACE, "Busy")) => Failure { sort: Sort::Busy, ..told },
        Some((INTERFACE, "NoSuchDisk")) => Failure { sort: Sort::NoSuchDisk, ..told },
        _ => {
            let why = format!("the daemon answers {error} {parameters}");
            Failure::run(what, why, "use the same version of both programs")
        }
    };
    Err(Failure { error: Some(error.to_owned()), ..told })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the fuzz target `call`: it ended the client.
    #[test]
    fn a_message_that_is_no_object_is_no_reply() {
        for message in [json!(5), json!([]), json!(null), json!("parameters")] {
            let failure = result(message.clone(), "list").unwrap_err();
            assert!(failure.why.contains(&message.to_string()), "{failure:?}");
        }
    }

    #[test]
    fn a_call_without_parameters_or_flags_has_none() {
        let call = Call::of(json!({"method": "a.B"})).unwrap();
        let expected =
            Call { method: "a.B".into(), parameters: Map::new(), oneway: false, more: false };
        assert_eq!(call, expected);
        let nulls = json!({"method": "a.B", "parameters": null, "more": null, "new": 1});
        assert_eq!(Call::of(nulls).unwrap(), expected);
        assert!(Call::of(json!({"method": "a.B", "more": true})).unwrap().more);
    }

    #[test]
    fn messages_that_are_no_calls_are_told_apart() {
        for message in [
            json!(null),
            json!([]),
            json!("a.B"),
            json!({}),
            json!({"method": 1}),
            json!({"method": "a.B", "parameters": []}),
            json!({"method": "a.B", "more": 1}),
            json!({"method": "a.B", "upgrade": "yes"}),
        ] {
            assert_eq!(Call::of(message.clone()), None, "{message}");
        }
    }

    #[test]
    fn parameters_are_named_when_they_are_wrong() {
        let mut call =
            Call::of(json!({"method": "a.B", "parameters": {"a": 1, "b": "x", "c": null}}))
                .unwrap();
        let wrong = |name: &str| CallError::InvalidParameter(name.to_owned());
        assert_eq!(call.optional("a", text), Err(wrong("a")));
        assert_eq!(call.no_more(), Err(wrong("b")));
        assert_eq!(call.required("b", text), Ok("x".to_owned()));
        assert_eq!(call.required("c", text), Err(wrong("c")));
        assert_eq!(call.no_more(), Ok(()));
    }

    #[test]
    fn a_failure_is_the_same_at_the_other_end() {
        for (sort, name) in [
            (Sort::Run, "io.vhostblk.Refused"),
            (Sort::Usage, "io.vhostblk.InvalidOptions"),
            (Sort::NoSuchDisk, "io.vhostblk.NoSuchDisk"),
            (Sort::Busy, "io.vhostblk.Busy"),
        ] {
            let failure = Failure { sort, ..Failure::run("a", "b", "c") };
            let told = error(CallError::Failure(failure.clone()));
            let named = Failure { error: Some(name.to_owned()), ..failure };
            assert_eq!(result(told, "d"), Err(named));
        }
        let told = error(CallError::MethodNotFound("New".into()));
        assert!(result(told, "d").unwrap_err().to_string().contains("MethodNotFound"));
        assert_eq!(result(reply(json!({"x": 1}), false), "d"), Ok(json!({"x": 1})));
    }
}
