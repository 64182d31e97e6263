// SPDX-License-Identifier: Apache-2.0
//! The parts of a Markdown document that can be compared with something.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::ops::Range;

/// A document and its parts.
#[derive(Debug, Default)]
pub struct Document {
    /// Path from the root of the repository.
    pub path: String,
    /// The whole text.
    pub text: String,
    /// Headings as text.
    pub headings: Vec<String>,
    /// Destinations of links and images.
    pub links: Vec<String>,
    /// Texts in backticks.
    pub codes: Vec<String>,
    /// Fenced and indented blocks.
    pub blocks: Vec<String>,
    /// Tables.
    pub tables: Vec<Table>,
    /// Byte ranges of blocks and tables.
    unfilled: Vec<Range<usize>>,
}

/// A table without its head.
#[derive(Debug, Default)]
pub struct Table {
    /// The heading above it.
    pub heading: String,
    /// Rows of cells.
    pub rows: Vec<Vec<Cell>>,
}

/// A cell of a table.
#[derive(Debug, Default)]
pub struct Cell {
    /// The whole text, without marks.
    pub text: String,
    /// The texts in backticks.
    pub codes: Vec<String>,
}

impl Cell {
    /// The text of a cell that is nothing but one text in backticks.
    pub fn only_code(&self) -> Option<&str> {
        match self.codes.as_slice() {
            [code] if *code == self.text => Some(code),
            _ => None,
        }
    }
}

impl Document {
    /// Parses `text`. Messages name it by its `path`.
    pub fn parse(path: &str, text: &str) -> Self {
        let document = Self { path: path.into(), text: text.into(), ..Self::default() };
        let mut reader = Reader { document, heading: None, block: None, cell: None };
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(tag) => reader.start(tag, range),
                Event::End(tag) => reader.end(tag),
                Event::Text(text) => reader.text(&text),
                Event::Code(code) => reader.code(&code),
                Event::SoftBreak | Event::HardBreak => reader.text(" "),
                _ => {}
            }
        }
        reader.document
    }

    /// The first column of all tables under `heading`, sorted.
    pub fn first_column(&self, heading: &str) -> Vec<String> {
        let rows =
            self.tables.iter().filter(|table| table.heading == heading).flat_map(|t| &t.rows);
        let mut column: Vec<_> = rows.map(|row| row[0].text.clone()).collect();
        column.sort();
        column
    }

    /// The anchors of the headings, as the usual web pages make them.
    pub fn anchors(&self) -> impl Iterator<Item = String> + '_ {
        self.headings.iter().map(|heading| {
            let lower = heading.to_ascii_lowercase();
            let kept = lower.chars().filter(|c| c.is_ascii_alphanumeric() || " _-".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
    }

    /// The lines of text, with their numbers: all lines outside of blocks and tables.
    pub fn text_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let base = self.text.as_ptr() as usize;
        self.text.lines().enumerate().filter_map(move |(index, line)| {
            let at = line.as_ptr() as usize - base;
            // A table in a list begins behind the indentation of its line.
            let overlaps = |range: &Range<usize>| range.start < at + line.len() && at < range.end;
            let is_text = !self.unfilled.iter().any(overlaps);
            is_text.then_some((index + 1, line))
        })
    }

    /// The lines of blocks. A line that ends with a backslash goes on in the next one.
    pub fn block_lines(&self) -> Vec<String> {
        let joined = self.blocks.iter().map(|block| block.replace("\\\n", " "));
        joined.flat_map(|block| block.lines().map(String::from).collect::<Vec<_>>()).collect()
    }
}

/// A document in the making, and the parts that the parser is in.
struct Reader {
    document: Document,
    heading: Option<String>,
    block: Option<String>,
    cell: Option<Cell>,
}

impl Reader {
    fn start(&mut self, tag: Tag<'_>, range: Range<usize>) {
        match tag {
            Tag::Heading { .. } => self.heading = Some(String::new()),
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                self.document.links.push(dest_url.into_string());
            }
            Tag::CodeBlock(_) => {
                self.block = Some(String::new());
                self.document.unfilled.push(range);
            }
            Tag::Table(_) => {
                let heading = self.document.headings.last().cloned().unwrap_or_default();
                self.document.tables.push(Table { heading, rows: Vec::new() });
                self.document.unfilled.push(range);
            }
            Tag::TableRow => {
                if let Some(table) = self.document.tables.last_mut() {
                    table.rows.push(Vec::new());
                }
            }
            Tag::TableCell => self.cell = Some(Cell::default()),
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Heading(_) => self.document.headings.extend(self.heading.take()),
            TagEnd::CodeBlock => self.document.blocks.extend(self.block.take()),
            TagEnd::TableCell => {
                // The head of a table comes before its first row.
                let row = self.document.tables.last_mut().and_then(|table| table.rows.last_mut());
                if let (Some(row), Some(cell)) = (row, self.cell.take()) {
                    row.push(cell);
                }
            }
            _ => {}
        }
    }

    fn text(&mut self, text: &str) {
        let place = match self {
            Self { block: Some(block), .. } => block,
            Self { cell: Some(cell), .. } => &mut cell.text,
            Self { heading: Some(heading), .. } => heading,
            _ => return,
        };
        place.push_str(text);
    }

    fn code(&mut self, code: &str) {
        self.text(code);
        self.document.codes.push(code.into());
        if let Some(cell) = &mut self.cell {
            cell.codes.push(code.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_in_a_list_is_no_text() {
        let document = Document::parse("a.md", "* a\n\n  | H |\n  |---|\n  | b |\n\n  c\n");
        let numbers: Vec<_> = document.text_lines().map(|(number, _)| number).collect();
        assert_eq!(numbers, [1, 2, 6, 7]);
    }

    #[test]
    fn a_fence_hides_links_and_a_table_has_cells() {
        let text = "# A `b` c\n\n[x](y#z) `code`\n\n```sh\n[no](no) `no` \\\n  more\n```\n\n\
            | H | I |\n|---|---|\n| `k\\|l` | m `n` |\n";
        let document = Document::parse("a.md", text);
        assert_eq!(document.anchors().collect::<Vec<_>>(), ["a-b-c"]);
        assert_eq!(document.links, ["y#z"]);
        assert_eq!(document.codes, ["b", "code", "k|l", "n"]);
        assert_eq!(document.block_lines(), ["[no](no) `no`    more"]);
        assert_eq!(document.first_column("A b c"), ["k|l"]);
        let row = &document.tables[0].rows[0];
        assert_eq!((row[0].only_code(), row[1].only_code()), (Some("k|l"), None));
        let numbers: Vec<_> = document.text_lines().map(|(number, _)| number).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 9]);
    }
}
