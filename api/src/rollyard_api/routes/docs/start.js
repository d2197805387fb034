"use strict";
// The document of /docs loads this file after Swagger UI.
const prefix = document.querySelector('meta[name="rollyard-prefix"]').content;
SwaggerUIBundle({
  url: `${prefix}/openapi.json`,
  dom_id: "#docs",
  deepLinking: true,
  // Without this, Swagger UI asks a server on the internet whether the document is valid.
  validatorUrl: null,
});
