// SPDX-License-Identifier: Apache-2.0
//! A document of headings, texts, tables and charts, as HTML and as Markdown.

use std::fmt::Write;

use anyhow::Result;

use super::chart::{Chart, css_colour, svg};
use super::flow::{self, Flow};

/// The style of the page: colours of the reader's choice, no script, nothing from a network.
const STYLE: &str = include_str!("style.css");

/// A part of a document.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Block {
    /// Level from 2, text.
    Heading(u8, String),
    Text(String),
    List(Vec<String>),
    Table(Table),
    Charts(Vec<Chart>),
    Flows(Vec<Flow>),
}

/// A table; a cell that is a number is aligned to the right.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Table {
    pub(super) head: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with this head.
    pub(super) fn new(head: &[&str]) -> Self {
        let head = head.iter().map(|&head| head.to_owned()).collect();
        Self { head, rows: Vec::new() }
    }
}

/// Everything below a title.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) title: String,
    pub(super) blocks: Vec<Block>,
}

impl Document {
    /// The whole page.
    pub(super) fn html(&self) -> Result<String> {
        let title = escaped(&self.title);
        let mut text = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n\
             <meta name=\"viewport\" content=\"width=device-width\"/>\n\
             <title>{title}</title>\n<style>\n{STYLE}</style></head>\n\
             <body><main>\n<h1>{title}</h1>\n"
        );
        for block in &self.blocks {
            write_html(block, &mut text)?;
        }
        text.push_str("</main></body></html>\n");
        Ok(text)
    }

    /// The same without charts, which repeat figures of the tables.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# {}\n", self.title);
        for block in &self.blocks {
            text.push('\n');
            write_markdown(block, &mut text);
        }
        text
    }
}

fn write_html(block: &Block, text: &mut String) -> Result<()> {
    match block {
        Block::Heading(level, title) => {
            writeln!(text, "<h{level}>{}</h{level}>", escaped(title))?;
        }
        Block::Text(paragraphs) => {
            for paragraph in paragraphs.split("\n\n") {
                writeln!(text, "<p>{}</p>", inline(paragraph))?;
            }
        }
        Block::List(items) => {
            let items: String =
                items.iter().map(|item| format!("<li>{}</li>", inline(item))).collect();
            writeln!(text, "<ul>{items}</ul>")?;
        }
        Block::Table(table) => write_table(table, text),
        Block::Charts(charts) => {
            text.push_str("<div class=\"charts\">");
            for chart in charts {
                write_chart(chart, text)?;
            }
            text.push_str("</div>\n");
        }
        Block::Flows(flows) => {
            text.push_str("<div class=\"charts\">");
            for flow in flows {
                let colours =
                    flow.curves.iter().map(|(stage, _)| (flow::css_colour(stage), *stage));
                write_figure(&flow.title, &flow::svg(flow)?, colours, text)?;
            }
            text.push_str("</div>\n");
        }
    }
    Ok(())
}

fn write_table(table: &Table, text: &mut String) {
    let cells = |tag: &str, cells: &[String]| -> String {
        let cell = |cell: &String| {
            let class = if is_number(cell) { " class=\"number\"" } else { "" };
            format!("<{tag}{class}>{}</{tag}>", inline(cell))
        };
        cells.iter().map(cell).collect()
    };
    let _ = writeln!(
        text,
        "<div class=\"wide\"><table><thead><tr>{}</tr></thead><tbody>",
        cells("th", &table.head)
    );
    for row in &table.rows {
        let _ = writeln!(text, "<tr>{}</tr>", cells("td", row));
    }
    text.push_str("</tbody></table></div>\n");
}

fn write_chart(chart: &Chart, text: &mut String) -> Result<()> {
    let names = chart.series.iter().map(|series| series.name.as_str());
    let colours = names.map(|name| (css_colour(name), name));
    write_figure(&chart.title, &svg(chart)?, colours, text)
}

/// A drawing with its title, and the meaning of its colours.
fn write_figure<'a>(
    title: &str,
    svg: &str,
    colours: impl Iterator<Item = (String, &'a str)>,
    text: &mut String,
) -> Result<()> {
    let title = escaped(title);
    write!(text, "<figure><figcaption>{title}</figcaption>{svg}<div class=\"legend\">")?;
    for (colour, name) in colours {
        let name = escaped(name);
        write!(text, "<span><i style=\"background:{colour}\"></i>{name}</span> ")?;
    }
    text.push_str("</div></figure>\n");
    Ok(())
}

fn write_markdown(block: &Block, text: &mut String) {
    match block {
        Block::Heading(level, title) => {
            let _ = writeln!(text, "{} {title}", "#".repeat((*level).into()));
        }
        Block::Text(paragraphs) => {
            let _ = writeln!(text, "{paragraphs}");
        }
        Block::List(items) => items.iter().for_each(|item| {
            let _ = writeln!(text, "- {item}");
        }),
        Block::Table(table) => {
            let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
            text.push_str(&line(&table.head));
            text.push_str(&line(&vec!["---".to_owned(); table.head.len()]));
            table.rows.iter().for_each(|row| text.push_str(&line(row)));
        }
        Block::Charts(charts) => {
            let titles: Vec<_> = charts.iter().map(|chart| chart.title.as_str()).collect();
            let _ = writeln!(text, "(Charts in `index.html`: {}.)", titles.join("; "));
        }
        Block::Flows(flows) => {
            let titles: Vec<_> = flows.iter().map(|flow| flow.title.as_str()).collect();
            let _ = writeln!(text, "(Time lines in `index.html`: {}.)", titles.join("; "));
        }
    }
}

fn is_number(cell: &str) -> bool {
    !cell.is_empty() && cell.chars().all(|c| c.is_ascii_digit() || ".-% ".contains(c))
}

/// Text for HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Text with code in backticks, for HTML.
fn inline(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let part = |(i, part): (usize, &str)| {
        if i % 2 == 1 { format!("<code>{}</code>", escaped(part)) } else { escaped(part) }
    };
    parts.map(part).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use quick_xml::Reader;
    use quick_xml::events::Event;

    /// The texts of all elements with this tag; panics if the page is not well formed.
    pub(in crate::page) fn texts(html: &str, tag: &str) -> Vec<String> {
        let mut reader = Reader::from_str(html);
        reader.config_mut().check_end_names = true;
        let (mut texts, mut open, mut depth) = (Vec::new(), None, 0);
        loop {
            match reader.read_event().expect("the page is well formed") {
                Event::Start(start) => {
                    depth += 1;
                    if start.name().as_ref() == tag.as_bytes() {
                        open = Some(String::new());
                    }
                }
                Event::End(end) => {
                    depth -= 1;
                    if end.name().as_ref() == tag.as_bytes() {
                        texts.extend(open.take());
                    }
                }
                Event::Text(text) => {
                    if let Some(open) = &mut open {
                        open.push_str(&String::from_utf8_lossy(&text));
                    }
                }
                Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(depth, 0, "an element is not closed");
        texts
    }

    #[test]
    fn a_document_is_well_formed_whatever_its_texts_contain() {
        let mut table = Table::new(&["a < b", "`c`"]);
        table.rows.push(vec!["<script>".to_owned(), "1.5".to_owned()]);
        let blocks = vec![
            Block::Heading(2, "A & B".to_owned()),
            Block::Text("One `<two>`.\n\nThree".to_owned()),
            Block::List(vec!["x".to_owned()]),
            Block::Table(table),
        ];
        let document = Document { title: "T".to_owned(), blocks };
        let html = document.html().unwrap();
        assert!(!html.contains("<script"), "{html}");
        assert_eq!(texts(&html, "p").len(), 2);
        assert_eq!(texts(&html, "td")[1], "1.5");
        assert!(html.contains("<td class=\"number\">1.5</td>"));
        let markdown = document.markdown();
        assert!(markdown.contains("# T\n\n## A & B\n\nOne `<two>`."), "{markdown}");
        assert!(markdown.contains("| a < b | `c` |\n| --- | --- |\n"), "{markdown}");
    }
}
