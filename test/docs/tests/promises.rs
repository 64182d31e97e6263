// SPDX-License-Identifier: Apache-2.0
//! Each promise of docs/promises.md names tests and cases that exist, or the reason for none.

use docs::{Cell, Document, Table, files, read};
use std::collections::{HashMap, HashSet};
use syn::parse::{Parse, ParseStream};
use syn::{Attribute, Expr, Ident, Item, LitStr, Token};

const PAGE: &str = "docs/promises.md";
const UNPROVEN: &str = "Not proven: ";

/// Cases that the lab itself defines, in `test/lab/src/suite/case.rs`.
const CASES_OF_THE_LAB: [&str; 1] = ["module-reload"];

/// The tests of a source: those that run, and those that are ignored.
#[derive(Default)]
struct Tests {
    run: HashSet<String>,
    ignored: HashSet<String>,
}

impl Tests {
    fn of(path: &str) -> Self {
        let file = syn::parse_file(&read(path)).unwrap_or_else(|why| panic!("{path}: {why}"));
        let mut tests = Self::default();
        tests.add(&file.items);
        tests
    }

    fn add(&mut self, items: &[Item]) {
        for item in items {
            match item {
                Item::Mod(module) => {
                    self.add(module.content.as_ref().map_or(&[], |(_, items)| items));
                }
                Item::Fn(function) => self.add_function(&function.attrs, &function.sig.ident),
                Item::Macro(item) if item.mac.path.is_ident("proptest") => {
                    let Properties(found) = item.mac.parse_body().expect("attributes of proptest!");
                    found.iter().for_each(|(attrs, name)| self.add_function(attrs, name));
                }
                _ => {}
            }
        }
    }

    fn add_function(&mut self, attributes: &[Attribute], name: &Ident) {
        if has(attributes, "test") {
            let tests = match has(attributes, "ignore") {
                true => &mut self.ignored,
                false => &mut self.run,
            };
            tests.insert(name.to_string());
        }
    }
}

/// The functions in a `proptest!`, with their attributes. Their parameters are no Rust.
struct Properties(Vec<(Vec<Attribute>, Ident)>);

impl Parse for Properties {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let (mut functions, mut attributes) = (Vec::new(), Vec::new());
        while !input.is_empty() {
            if input.peek(Token![#]) && input.peek2(syn::token::Bracket) {
                attributes = input.call(Attribute::parse_outer)?;
            } else if input.peek(Token![fn]) {
                input.parse::<Token![fn]>()?;
                functions.push((std::mem::take(&mut attributes), input.parse()?));
            } else {
                input.step(|cursor| match cursor.token_tree() {
                    Some((_, rest)) => Ok(((), rest)),
                    None => Err(cursor.error("a token")),
                })?;
            }
        }
        Ok(Self(functions))
    }
}

fn has(attributes: &[Attribute], name: &str) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident(name))
}

/// The names in a table of `cases!` (`test/cases/src/case.rs`).
struct Names(Vec<String>);

impl Parse for Names {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        input.parse::<Ident>()?;
        input.parse::<Token![;]>()?;
        let mut names = Vec::new();
        while !input.is_empty() {
            names.push(input.parse::<LitStr>()?.value());
            for _ in ["needs", "description", "body"] {
                input.parse::<Token![,]>()?;
                input.parse::<Expr>()?;
            }
            input.parse::<Token![;]>()?;
        }
        Ok(Self(names))
    }
}

/// The names of all cases, without the modes of guest cases.
fn cases() -> HashSet<String> {
    let mut names: HashSet<String> = CASES_OF_THE_LAB.map(String::from).into();
    for path in files().iter().filter(|path| path.starts_with("test/cases/src/")) {
        let Some(source) = path.ends_with(".rs").then(|| read(path)) else { continue };
        let file = syn::parse_file(&source).unwrap_or_else(|why| panic!("{path}: {why}"));
        for item in &file.items {
            if let Item::Macro(table) = item
                && table.mac.path.is_ident("cases")
            {
                let found: Names =
                    table.mac.parse_body().unwrap_or_else(|why| panic!("{path}: {why}"));
                names.extend(found.0);
            }
        }
    }
    assert!(names.len() > 150, "only {} cases were found", names.len());
    names
}

/// The flaws of the proofs in a page.
struct Judge {
    cases: HashSet<String>,
    tests: HashMap<String, Tests>,
}

impl Judge {
    fn new() -> Self {
        Self { cases: cases(), tests: HashMap::new() }
    }

    fn flaws(&mut self, tables: &[Table]) -> Vec<String> {
        let rows = tables.iter().flat_map(|table| &table.rows);
        rows.filter_map(|row| {
            let [promise, said_in, proof] = row.as_slice() else {
                return Some(format!("a row does not have three columns: {row:?}"));
            };
            if promise.text.is_empty() || said_in.text.is_empty() {
                return Some(format!("an empty cell: {row:?}"));
            }
            self.flaw_of(proof).map(|flaw| format!("{}: {flaw}", promise.text))
        })
        .collect()
    }

    fn flaw_of(&mut self, proof: &Cell) -> Option<String> {
        if let Some(reason) = proof.text.strip_prefix(UNPROVEN) {
            return reason.is_empty().then(|| "no reason for the missing proof".to_owned());
        }
        if proof.codes.is_empty() || proof.text != proof.codes.join(", ") {
            return Some(format!("a proof is a list of tests and cases, not: {}", proof.text));
        }
        proof.codes.iter().find_map(|code| match code.strip_prefix("lab ") {
            Some(case) => {
                let name = case.split('/').next().unwrap_or(case);
                (!self.cases.contains(name)).then(|| format!("the lab has no case {case}"))
            }
            None => self.flaw_of_test(code),
        })
    }

    fn flaw_of_test(&mut self, code: &str) -> Option<String> {
        let Some((path, test)) = code.split_once(":") else {
            return Some(format!("{code} is not of the form FILE:TEST or `lab NAME`"));
        };
        if !files().iter().any(|file| file == path) {
            return Some(format!("there is no {path}"));
        }
        let tests = self.tests.entry(path.to_owned()).or_insert_with(|| Tests::of(path));
        if tests.ignored.contains(test) {
            return Some(format!("the test {code} is ignored"));
        }
        (!tests.run.contains(test)).then(|| format!("there is no test {code}"))
    }
}

#[test]
fn each_promise_is_proven_by_tests_that_exist_or_says_why_not() {
    let page = Document::parse(PAGE, &read(PAGE));
    let rows: usize = page.tables.iter().map(|table| table.rows.len()).sum();
    assert!(rows > 50, "only {rows} promises were found");
    let flaws = Judge::new().flaws(&page.tables);
    assert!(flaws.is_empty(), "{PAGE}: {} flaws:\n{}", flaws.len(), flaws.join("\n"));
}

#[test]
fn a_proof_that_is_none_is_found() {
    let mut judge = Judge::new();
    let ignored = Tests { ignored: HashSet::from(["a".to_owned()]), ..Tests::default() };
    judge.tests.insert("README.md".to_owned(), ignored);
    for (proof, flaw) in [
        ("`lab no-such-case`", "the lab has no case no-such-case"),
        ("`test/docs/tests/promises.rs:no_such_test`", "there is no test"),
        ("`test/docs/tests/promises.rs:has`", "there is no test"),
        ("`test/no.rs:a`", "there is no test/no.rs"),
        ("`README.md:a`", "is ignored"),
        ("`README.md`", "not of the form"),
        ("by inspection", "a proof is a list"),
        ("`lab switch` and luck", "a proof is a list"),
        ("", "a proof is a list"),
    ] {
        let text = format!("| Promise | Said in | Proof |\n|---|---|---|\n| p | s | {proof} |\n");
        let found = judge.flaws(&Document::parse("a.md", &text).tables);
        assert!(found.len() == 1 && found[0].contains(flaw), "{proof}: {found:?}");
    }
}

#[test]
fn properties_are_tests_unless_they_are_ignored() {
    let source = "proptest! { #![proptest_config(c())] #[test] fn a(x in 0..9) { fn b() {} }
        #[test] #[ignore = \"slow\"] fn c(x in y()) {} fn d() {} }
        mod m { #[test] fn e() {} }";
    let mut tests = Tests::default();
    tests.add(&syn::parse_file(source).unwrap().items);
    assert_eq!(tests.run, ["a", "e"].map(String::from).into());
    assert_eq!(tests.ignored, ["c"].map(String::from).into());
}

#[test]
fn a_proof_and_a_reason_are_accepted() {
    let this = "`test/docs/tests/promises.rs:a_proof_and_a_reason_are_accepted`";
    let text = format!(
        "| Promise | Said in | Proof |\n|---|---|---|\n| p | s | {this}, `lab guest-verify/bio` |\n\
         | q | s | Not proven: there is no such machine |\n"
    );
    assert_eq!(Judge::new().flaws(&Document::parse("a.md", &text).tables), [""; 0]);
}
