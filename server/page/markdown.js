
// Markdown as models write it, made into elements one by one: what a model says is never read as HTML.
const markdown = {
  inline(text) {
    const out = document.createDocumentFragment();
    const mark = /(`+)([\s\S]+?)\1(?!`)|\*\*([^*]+?)\*\*|\*([^*\s][^*]*?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;
    for (let rest = text; rest;) {
      const found = mark.exec(rest);
      if (!found) { out.append(rest); break; }
      out.append(rest.slice(0, found.index));
      if (found[1]) out.append(make('code', { textContent: found[2].trim() }));
      else if (found[3]) out.append(make('strong', {}, this.inline(found[3])));
      else if (found[4]) out.append(make('em', {}, this.inline(found[4])));
      else out.append(make('a', { href: found[6], target: '_blank', rel: 'noopener noreferrer' }, found[5]));
      rest = rest.slice(found.index + found[0].length);
    }
    return out;
  },

  code(lines, language) {
    const text = lines.join('\n');
    const copy = make('button', { type: 'button', textContent: 'Copy' });
    copy.addEventListener('click', async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = 'Copied';
    });
    return make('pre', {}, make('code', { textContent: text, title: language }), copy);
  },

  // The end of the block that begins at `from`: the first later line for which `other` holds.
  end(lines, from, other) {
    let to = from;
    while (to < lines.length && !other(lines[to])) ++to;
    return to;
  },

  list(lines, ordered) {
    const list = make(ordered ? 'ol' : 'ul');
    for (const line of lines) {
      const item = /^\s*(?:[-*+]|\d+[.)])\s+(.*)$/.exec(line);
      if (item) list.append(make('li', {}, this.inline(item[1])));
      else if (list.lastChild) list.lastChild.append(' ', this.inline(line.trim()));
    }
    return list;
  },

  render(text) {
    const out = document.createDocumentFragment();
    const lines = text.split('\n');
    const starts = (line) => /^(\s*```|#{1,6}\s|>|\s*([-*+]|\d+[.)])\s)/.test(line);
    for (let at = 0; at < lines.length;) {
      const line = lines[at];
      const fence = /^\s*```\s*(\S*)/.exec(line), heading = /^(#{1,6})\s+(.*)$/.exec(line);
      const item = /^\s*([-*+]|\d+[.)])\s+/.exec(line);
      let to = at + 1;
      if (fence) {
        to = this.end(lines, at + 1, (one) => /^\s*```\s*$/.test(one));
        out.append(this.code(lines.slice(at + 1, to), fence[1]));
        ++to;
      } else if (heading) {
        out.append(make('h' + Math.min(6, heading[1].length + 2), {}, this.inline(heading[2])));
      } else if (line.startsWith('>')) {
        to = this.end(lines, at, (one) => !one.startsWith('>'));
        const quoted = lines.slice(at, to).map((one) => one.replace(/^>\s?/, '')).join('\n');
        out.append(make('blockquote', {}, this.inline(quoted)));
      } else if (item) {
        to = this.end(lines, at, (one) => one.trim() === '' || /^(\s*```|#{1,6}\s|>)/.test(one));
        out.append(this.list(lines.slice(at, to), /\d/.test(item[1])));
      } else if (line.trim() !== '') {
        to = this.end(lines, at + 1, (one) => one.trim() === '' || starts(one));
        out.append(make('p', {}, this.inline(lines.slice(at, to).join('\n'))));
      }
      at = to;
    }
    return out;
  },
};
