// The boxes above the list: an expression, and words.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { type Address, type Change, changedBy, formatAddress, go } from "./address";
import { useKeys } from "./hooks";
import { source } from "./source";
import type { State } from "./types";

export interface Moving {
  address: Address;
  state: State;
  move(change: Change): void;
}

interface Props extends Moving {
  error: string | null;
  /** Further controls. */
  children?: ComponentChildren;
}

export function Filters({ address, state, move, error, children }: Props): JSX.Element {
  const search = useRef<HTMLInputElement>(null);
  useKeys({
    "/": () => search.current?.focus(),
    c: () => go(changedBy(address, { curve: address.curve ?? "policy_version" })),
  });
  return (
    <div class="filters">
      {!source.embedded && (
        <form role="search" aria-label="Filter" onSubmit={(event) => event.preventDefault()}>
          <Box
            name="where"
            label="where"
            value={address.where ?? ""}
            set={(where) => move({ where })}
            placeholder={'reward < 0.5 and status == "error"'}
            invalid={error !== null}
            title={`Names: ${state.fields.join(", ")}`}
          />
        </form>
      )}
      <Box
        name="search"
        label="search"
        value={address.search ?? ""}
        set={(words) => move({ search: words })}
        placeholder="words of messages, errors, ids"
        field={search}
        invalid={false}
        title='Words of its messages, errors, logs and ids, or a "phrase" (/)'
      />
      <a
        class="switch"
        href={formatAddress(changedBy(address, address.curve ? NO_CURVE : { curve: "policy_version" }))}
        title="Rates by policy version and by task (c)"
      >
        {address.curve ? "List" : "Curves"}
      </a>
      {children}
      {error !== null && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
    </div>
  );
}

const NO_CURVE = { curve: undefined, pass: undefined, scored: undefined };

interface BoxProps {
  name: string;
  label: string;
  value: string;
  set(value: string): void;
  placeholder: string;
  title: string;
  invalid: boolean;
  field?: { current: HTMLInputElement | null };
}

const TYPING_MILLIS = 350;

function Box({ name, label, value, set, placeholder, title, invalid, field }: BoxProps): JSX.Element {
  const [text, setText] = useState(value);
  const waiting = useRef(0);
  useEffect(() => setText(value), [value]);
  const later = (next: string) => {
    setText(next);
    clearTimeout(waiting.current);
    waiting.current = setTimeout(() => set(next.trim()), TYPING_MILLIS);
  };
  return (
    <label class={`box ${name}`}>
      <span>{label}</span>
      <input
        ref={field ?? null}
        name={name}
        value={text}
        placeholder={placeholder}
        title={title}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={invalid}
        onInput={(event) => later(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter") return;
          clearTimeout(waiting.current);
          set(text.trim());
        }}
      />
      {text !== "" && (
        <button
          type="button"
          class="clear"
          aria-label={`Clear ${label}`}
          onClick={() => {
            setText("");
            set("");
          }}
        >
          ×
        </button>
      )}
    </label>
  );
}
