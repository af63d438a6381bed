// Markdown of replies as nodes: rendered by markdown-it, code highlighted by highlight.js, all of it sanitized by DOMPurify.
"use strict";

const markdown = window.markdownit({ linkify: true, breaks: true, highlight }).disable("image");

// Cells are aligned by classes: the page's policy lets no style attributes through.
markdown.core.ruler.push("align", state => {
  for (const token of state.tokens) {
    if (token.attrGet("style")) token.attrs = [["class", token.attrGet("style").replace("text-align:", "")]];
  }
});

function highlight(code, language) {
  return window.hljs.getLanguage(language) ? window.hljs.highlight(code, { language, ignoreIllegals: true }).value : "";
}

DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.tagName === "A") {
    node.target = "_blank";
    node.rel = "noopener noreferrer";
  }
});

/** A text in Markdown as a fragment; blocks of code have a button that copies them. */
function rendered(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), {
    ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
      "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text"],
    ALLOWED_ATTR: ["class", "href", "start"],
    RETURN_DOM_FRAGMENT: true,
  });
  for (const block of fragment.querySelectorAll("pre")) {
    const frame = element("div", "code"), bar = element("div", "bar");
    const language = /language-(\S+)/.exec(block.firstElementChild?.className);
    bar.append(element("span", "", language ? language[1] : "text"), button("Copy", "copy"));
    block.replaceWith(frame);
    frame.append(bar, block);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", "table");
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function element(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}

function button(text, kind, action = null) {
  const made = element("button", kind, text);
  made.type = "button";
  made.onclick = action;
  return made;
}

/** Copy a text, also where the page does not come from this machine by https, and say so on the button. */
async function copy(text, from) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const area = element("textarea", "", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}
