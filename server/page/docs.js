
// What the API takes and answers, from /openapi.json.
function typeOf(schema) {
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(' or ');
  const names = [].concat(schema.type || 'any').filter((name) => name !== 'null').join(' or ');
  const range = schema.minimum === undefined ? '' : ', ' + schema.minimum + ' to ' + (schema.maximum ?? 'any');
  return names + range;
}

function fieldsOf(schema) {
  const required = new Set(schema.required || []);
  return make('table', {}, make('tbody', {}, ...Object.entries(schema.properties).map(([name, one]) =>
    make('tr', {}, make('td', {}, make('code', { textContent: name }), required.has(name) ? ' (required)' : ''),
         make('td', { textContent: typeOf(one) })))));
}

function operationOf(path, method, operation, schemas) {
  const box = make('details', { className: 'operation' });
  box.append(make('summary', {}, make('code', { textContent: method.toUpperCase() + ' ' + path }),
                  ' ' + operation.summary));
  const reference = operation.requestBody?.content['application/json'].schema.$ref;
  if (reference) box.append(fieldsOf(schemas[reference.split('/').pop()]));
  const answers = Object.entries(operation.responses).map(([status, one]) =>
    make('li', { textContent: status + ': ' + one.description + ' (' + Object.keys(one.content).join(', ') + ')' }));
  box.append(make('ul', {}, ...answers));
  return box;
}

async function showDocs() {
  const response = await api.ask('openapi.json');
  if (!response.ok) {
    element('operations').textContent = await api.failure(response);
    return;
  }
  const described = await response.json(), boxes = [];
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(methods))
      boxes.push(operationOf(path, method, operation, described.components.schemas));
  }
  element('operations').replaceChildren(...boxes);
}

document.addEventListener('view', (event) => { if (event.detail === 'docs') showDocs(); });
if (location.pathname.endsWith('/docs')) showView('docs');
