// Markdown as nodes: the lexer of `marked` reads it, nothing is ever parsed as HTML.

import { type Token, type Tokens, lexer } from "marked";
import type { ComponentChildren, JSX } from "preact";

import { Prose } from "./text";

const SAFE_LINK = /^(https?:|mailto:)/i;
const DEEPEST = 24;
/** Signs that nest, in numbers that no writer needs: read as plain text, in linear time. */
const NESTED = /(?:[>[\]*_~`!(] ?){120}|(?:^|\n)[ \t]*(?:(?:[-+*>]|\d+[.)])[ \t]*){20}/;
/** Emphasis is found in time that is the square of these. */
const EMPHASIS = /[*_~]/g;
const MOST_EMPHASIS = 2500;

export function Markdown({ text }: { text: string }): JSX.Element {
  const tokens = tokensOf(text);
  if (tokens === null) return <Plain text={text} />;
  return <div class="markdown">{blocks(tokens, 0)}</div>;
}

/** The text as it is, lines kept. */
export function Plain({ text }: { text: string }): JSX.Element {
  return (
    <div class="plain" dir="auto">
      <Prose text={text} />
    </div>
  );
}

function tokensOf(text: string): Token[] | null {
  if (NESTED.test(text) || (text.match(EMPHASIS)?.length ?? 0) > MOST_EMPHASIS) return null;
  try {
    return lexer(text, { gfm: true, breaks: true });
  } catch {
    return null; // Nested deeper than the lexer goes.
  }
}

function blocks(tokens: Token[], depth: number): ComponentChildren[] {
  return tokens.map((token) => (depth > DEEPEST ? <Prose text={token.raw} /> : block(token, depth + 1)));
}

function block(token: Token, depth: number): ComponentChildren {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      const Heading = `h${Math.min(6, (token as Tokens.Heading).depth + 2)}` as "h3";
      return <Heading dir="auto">{inline(token.tokens ?? [], depth)}</Heading>;
    }
    case "paragraph":
      return <p dir="auto">{inline(token.tokens ?? [], depth)}</p>;
    case "code": {
      const { lang, text } = token as Tokens.Code;
      return <Code text={text} language={lang ?? ""} />;
    }
    case "blockquote":
      return <blockquote dir="auto">{blocks(token.tokens ?? [], depth)}</blockquote>;
    case "hr":
      return <hr />;
    case "list":
      return list(token as Tokens.List, depth);
    case "table":
      return table(token as Tokens.Table, depth);
    case "text":
      return inlineToken(token, depth);
    default: // HTML, and what later versions know: as it was written.
      return <Plain text={token.raw} />;
  }
}

function list(token: Tokens.List, depth: number): JSX.Element {
  const items = token.items.map((item) => (
    <li dir="auto">
      {item.task && <input type="checkbox" disabled checked={item.checked === true} />}
      {blocks(
        item.tokens.filter((part) => part.type !== "checkbox"),
        depth,
      )}
    </li>
  ));
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function table(token: Tokens.Table, depth: number): JSX.Element {
  const cell = (one: Tokens.TableCell) => inline(one.tokens, depth);
  return (
    <div class="scroll">
      <table>
        <thead>
          <tr>
            {token.header.map((one) => (
              <th>{cell(one)}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {token.rows.map((row) => (
            <tr>
              {row.map((one) => (
                <td>{cell(one)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function inline(tokens: Token[], depth: number): ComponentChildren[] {
  return tokens.map((token) =>
    depth > DEEPEST ? <Prose text={token.raw} /> : inlineToken(token, depth + 1),
  );
}

function inlineToken(token: Token, depth: number): ComponentChildren {
  const inner = () => inline(("tokens" in token && token.tokens) || [], depth);
  switch (token.type) {
    case "text":
      return token.tokens ? inner() : <Prose text={token.text} />;
    case "escape":
      return <Prose text={token.text} />;
    case "strong":
      return <strong>{inner()}</strong>;
    case "em":
      return <em>{inner()}</em>;
    case "del":
      return <del>{inner()}</del>;
    case "codespan":
      return (
        <code>
          <Prose text={token.text} />
        </code>
      );
    case "br":
      return <br />;
    case "link":
      return <Link address={(token as Tokens.Link).href}>{inner()}</Link>;
    default: // Images too: nothing is loaded from elsewhere.
      return <Prose text={token.raw} />;
  }
}

/** A link shows where it goes, and goes only where nothing can run. */
export function Link({ address, children }: { address: string; children?: ComponentChildren }): JSX.Element {
  const where = (
    <span class="address">
      <Prose text={address} />
    </span>
  );
  if (!SAFE_LINK.test(address))
    return (
      <span>
        {children} {where}
      </span>
    );
  return (
    <span>
      <a href={address} rel="noreferrer noopener" target="_blank">
        {children ?? where}
      </a>
      {children !== undefined && <> {where}</>}
    </span>
  );
}

export function Code({ text, language }: { text: string; language: string }): JSX.Element {
  return (
    <figure class="code">
      {language && (
        <figcaption>
          <Prose text={language} />
        </figcaption>
      )}
      <pre tabIndex={0}>
        <code>
          <Prose text={text} />
        </code>
      </pre>
    </figure>
  );
}
